"""The faults depend only on the seed. At no time are there so many faults that nothing works."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos.faults import CHANGES, FAULTS
from chaos.run import Order, planned
from chaos.schedule import Kind, Planned, plan

KINDS = (
    Kind(name="kill-router", targets=("router-1", "router-2"), weight=2.0, seconds=(0.0, 0.0)),
    Kind(name="freeze-router", targets=("router-1", "router-2"), weight=1.0, seconds=(1.0, 8.0)),
    Kind(name="kill-postgres", targets=("s1", "s2", "s3"), weight=1.0, seconds=(1.0, 6.0)),
    Kind(name="jump-clock", targets=("clock",), weight=1.0, seconds=(1.0, 6.0)),
    Kind(name="nowhere", targets=(), weight=9.0, seconds=(1.0, 6.0)),
)
SECONDS = 600.0


def struck(planned: Sequence[Planned], at_s: float) -> list[str]:
    return [one.target for one in planned if one.start_s <= at_s <= one.end_s]


def test_a_seed_draws_the_same_faults_again_and_another_seed_others() -> None:
    assert plan(KINDS, seed="1", seconds=SECONDS) == plan(KINDS, seed="1", seconds=SECONDS)
    assert plan(KINDS, seed="1", seconds=SECONDS) != plan(KINDS, seed="2", seconds=SECONDS)


@pytest.mark.parametrize("seed", range(20))
def test_something_is_always_whole_and_all_is_over_by_the_end(seed: int) -> None:
    drawn = plan(KINDS, seed=str(seed), seconds=SECONDS)
    assert len(drawn) > SECONDS / 20
    assert {one.fault for one in drawn} == {"kill-router", "freeze-router", "kill-postgres", "jump-clock"}
    assert [one.start_s for one in drawn] == sorted(one.start_s for one in drawn)
    assert all(0 <= one.start_s <= one.end_s <= SECONDS for one in drawn)
    # Check only the moments when faults begin, because the state does not become worse between these moments.
    for one in drawn:
        targets = struck(drawn, one.start_s)
        assert len(targets) == len(set(targets)) <= 3
        assert len({*targets} & {"router-1", "router-2"}) <= 1
        assert len({*targets} & {"s1", "s2", "s3"}) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_a_target_has_a_pause_after_a_fault(seed: int) -> None:
    drawn = plan(KINDS, seed=str(seed), seconds=SECONDS)
    for _, of_target in itertools.groupby(sorted(drawn, key=lambda one: one.target), lambda one: one.target):
        for earlier, later in itertools.pairwise(of_target):
            assert later.start_s >= earlier.end_s + 2.0


def test_what_is_not_drawn_comes_by_itself_at_the_end() -> None:
    assert {name for name, kind in FAULTS.items() if not kind.drawn} == {"restore-backup"}
    assert all(kind.drawn or kind.alone for kind in FAULTS.values())


def test_nothing_to_draw_is_no_fault() -> None:
    assert plan([KINDS[-1]], seed="1", seconds=SECONDS) == []


def order(tmp_path: Path, seed: int, faults: Sequence[str] = tuple(FAULTS)) -> Order:
    return Order(seed=seed, seconds=SECONDS, out=tmp_path, faults=faults)


def test_every_fault_is_drawn_sooner_or_later_whatever_the_machine_has(tmp_path: Path) -> None:
    drawn = {one.fault for seed in range(5) for one in planned(order(tmp_path, seed))}
    assert drawn == {name for name, kind in FAULTS.items() if kind.drawn}


@pytest.mark.parametrize("seed", range(5))
def test_changes_are_drawn_beside_the_faults_and_leave_a_shard_that_takes_slots(tmp_path: Path, seed: int) -> None:
    drawn = planned(order(tmp_path, seed))
    faults = planned(order(tmp_path, seed, [name for name in FAULTS if name not in CHANGES]))
    assert [one for one in drawn if one.fault not in CHANGES] == faults
    changes = [one for one in drawn if one.fault in CHANGES]
    assert len(changes) > SECONDS / 20
    entries = {"entry-s1", "entry-s2", "entry-s3"}
    for one in changes:
        assert len({*struck(changes, one.start_s)} & entries) <= 2
