"""How ./run test reads its arguments, and which tests it runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests import changed
from tests.changed import Choice
from tests.effort import luck_of, waiting
from tests.suite import SIDE_BY_SIDE, parse, turn_of


def test_without_arguments_everything_runs_side_by_side_and_the_checks_beside_it() -> None:
    wanted = parse([])
    assert (wanted.checks, wanted.arguments) == (True, SIDE_BY_SIDE)


def test_only_a_run_of_everything_leaves_tests_to_another_hour() -> None:
    now = datetime(2026, 1, 31, 7, 59, tzinfo=UTC)
    assert [turn_of(now + timedelta(minutes=minutes)) - turn_of(now) for minutes in (0, 1, 60, 61)] == [0, 1, 1, 2]
    assert int(parse([]).environ["WINDROW_TEST_TURN"]) > turn_of(now)
    assert "WINDROW_TEST_TURN" not in parse(["tests/e2e"]).environ


def test_within_n_hours_each_test_that_takes_turns_in_n_has_one() -> None:
    tests = [None, *[3] * 8, 2, 1]
    hours = [waiting(tests, turn) for turn in range(739_000, 739_006)]
    for place, n in enumerate(tests):
        runs = [place not in hour for hour in hours]
        assert sum(runs) == 6 / (n or 1)
        assert runs[:3] == runs[3:] or n == 2
    # Tests that follow each other are spread over the hours.
    assert {sum(place not in hour for place in range(1, 5)) for hour in hours} == {1, 2}


def test_arguments_are_for_pytest_and_tests_run_one_after_another() -> None:
    assert parse(["-k", "fencing", "-x"]).arguments == ("-k", "fencing", "-x")


def test_a_thorough_run_says_its_seed_and_repeats_it() -> None:
    first = parse(["--thorough", "--minutes", "3"])
    seed = first.environ["WINDROW_SEED"]
    assert f"--seed {seed}" in first.said
    assert first.environ["WINDROW_TEST_MINUTES"] == "3.0"
    assert not first.checks
    again = parse(["--thorough", "--seed", seed, "tests/fault"])
    assert again.environ == {"WINDROW_THOROUGH": "1", "WINDROW_SEED": seed}
    assert first.arguments is not None
    assert again.arguments is not None
    (drawn,) = [argument for argument in again.arguments if argument.startswith("--hypothesis-seed=")]
    assert drawn in first.arguments


def test_a_part_of_a_thorough_run_is_repeated_without_the_others() -> None:
    part = parse(["--thorough", "--part", "20", "--minutes", "1", "--seed", "2026-01-31"])
    assert part.environ["WINDROW_TEST_PART"] == "20"
    assert part.said.endswith("./run test --thorough --seed 2026-01-31 TEST")


def test_the_builds_in_other_languages_run_one_after_another_and_say_what_was_skipped() -> None:
    wanted = parse(["--generators", "-k", "rust"])
    assert (wanted.checks, wanted.environ) == (False, {"WINDROW_GENERATORS": "1"})
    assert wanted.arguments == ("-rs", "tests/e2e/test_generated_clients.py", "-k", "rust")


def test_a_change_that_touches_no_test_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Choice(changed=["README.md"], files=[], left_out=0)
    monkeypatch.setattr(changed, "choose", lambda **_: chosen)
    wanted = parse(["--changed"])
    assert wanted.arguments is None
    assert "nothing to run" in wanted.said


@pytest.mark.parametrize(
    "line",
    [
        *("--changed --thorough", "--generators --changed", "--seed 1", "--minutes 3", "--part 2"),
        *("--thorough --part 0", "--thorough --minutes soon"),
    ],
)
def test_what_makes_no_sense_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(line.split())
    assert refused.value.code == 2
    assert "--" in capsys.readouterr().err


def test_the_same_test_draws_the_same() -> None:
    assert luck_of("one").random() == luck_of("one").random() != luck_of("other").random()
