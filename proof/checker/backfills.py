"""Checks I10 for backfills. An answered backfill has stored one job for each instant of its range, or has skipped the
instant because of an overlap. No instant is stored twice, or without a call that asked for it.

If an instant was skipped because of a pause or a catch-up, a backfill decides again about the instant. If an instant
has a run, a backfill does not change the run, for as long as the shard remembers the run. Shards remember runs of
backfills for days, and other runs for as long as they are among the schedule's newest. So a backfill may store a run
again if the shard has forgotten the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from proof.checker.evidence import CLOCK_US, Backfill, Run, Schedule
from proof.checker.schedule_terms import FOREVER_US, RUNS_KEPT, between, multiples

# A backfill stores instants that were skipped for these reasons.
UNDECIDED = frozenset({"catch_up", "pause"})

_Wrong = Iterator[tuple[int, str]]


def split(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Divides runs into two lists: the runs that schedules have decided by themselves or that were triggered, and the
    runs of backfills."""
    # One record covers all instants that were skipped together. If a backfill stores the first of them, the others get
    # a new record, which is no new decision.
    first_us: dict[tuple[str | None, int], int] = {}
    for run in runs:
        if run.skipped_for in UNDECIDED and run.through_us is not None:
            key = run.skipped_for, run.through_us
            first_us[key] = min(run.at_us, first_us.get(key, run.at_us))
    own = [
        run
        for run in runs
        if run.cause != "backfill"
        and first_us.get((run.skipped_for, run.through_us or run.at_us), run.at_us) == run.at_us
    ]
    return own, [run for run in runs if run.cause == "backfill"]


def check(
    schedule: Schedule,
    runs: Sequence[Run],
    decided: Mapping[int, set[str]],
    pauses: Sequence[tuple[int, int]],
) -> _Wrong:
    """Yields each instant that was decided wrongly, with a text that says what is wrong. `decided`: for each instant,
    what the schedule itself decided: the id of a job, or the reason of a skip. "" stands for a run that still waits."""
    own, backfilled = split(runs)
    asked = {one: _instants(schedule, one) for one in schedule.backfills}
    fates: defaultdict[int, list[Run]] = defaultdict(list)
    for run in backfilled:
        fates[run.at_us].append(run)
        by = [one for one, (_, may) in asked.items() if run.at_us in may and one.began_us <= run.decided_us + CLOCK_US]
        yield from ((run.at_us, what) for what in _faults(run, by, pauses))
    for at_us, of_it in sorted(fates.items()):
        last = {run.job or run.skipped_for for run in of_it} - {None}
        if len(last) > 1:
            yield at_us, f"backfills decided it {len(last)} times"
        earlier = decided.get(at_us, set()) - UNDECIDED - {""} - last
        if earlier and last and not _was_forgotten(at_us, own, runs, min(run.decided_us for run in of_it)):
            yield at_us, f"a backfill decided it, and it had a run: {', '.join(sorted(earlier))}"
    for one, (must, may) in asked.items():
        if one.ended_us is None:
            continue
        for at_us in sorted(must):
            if at_us not in fates and not decided.get(at_us, set()) - UNDECIDED:
                yield at_us, "an answered backfill has left it out"
        if must == may and one.instants != len(must):
            yield one.begin_us, f"a backfill of {len(must)} instants has told of {one.instants}"


def _instants(schedule: Schedule, one: Backfill) -> tuple[set[int], set[int]]:
    """Returns two sets: the instants that the call certainly decided if it was executed, and the instants that it may
    have decided."""
    # The schedule may end before the range of the backfill ends.
    end_us = min(one.end_us, schedule.ends_us)
    of_terms = [multiples(terms, one.begin_us - 1, end_us) for terms in between(schedule, one.began_us, one.ended_us)]
    return set.intersection(*of_terms), set.union(*of_terms)


def _faults(run: Run, by: Sequence[Backfill], pauses: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yields what is wrong with one decision. `by`: the calls that may have made the decision."""
    if not by:
        yield "a backfill decided it, and nobody asked for that"
    elif run.skipped_for is not None and not (run.skipped_for == "overlap" and any(one.may_skip for one in by)):
        yield f"a backfill skipped it for {run.skipped_for}, for which it may not be skipped"
    # If a run has waited, not the backfill but the schedule stores it later. A paused schedule stores no runs.
    at_once = any(run.decided_us <= (FOREVER_US if one.ended_us is None else one.ended_us) + CLOCK_US for one in by)
    if run.job is not None and not at_once and any(begin < run.decided_us < end for begin, end in pauses):
        yield f"job {run.job} had waited, and was stored during a pause"


def _was_forgotten(at_us: int, own: Sequence[Run], runs: Sequence[Run], decided_us: int) -> bool:
    """Returns whether, at the time `decided_us`, the shard had forgotten the schedule's own run of the instant `at_us`,
    because there were enough newer runs."""
    newer = {run.at_us for run in runs if run.at_us > at_us and run.decided_us <= decided_us}
    return len(newer) >= RUNS_KEPT and all(run.decided_us <= decided_us for run in own if run.at_us == at_us)
