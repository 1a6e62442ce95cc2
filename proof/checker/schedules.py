"""Checks I10: each instant between the creation and the end of a schedule was stored as one job, or skipped for a
reason that the schedule's policies allow. This also holds while operators pause, resume, alter and trigger the
schedule. Instants of a pause are skipped.

The shards record each run in the transaction that stores it, and a move copies the record. So two different records of
one instant are two decisions. The exception is a run that waited: one record was made when the run was buffered, and
one when it was stored. The job that a record names must exist, and each job that names a run must have a record.
Schedules end before the backup is made, so the backup lacks no runs. But the backup lacks schedules and dead jobs that
moved to the shard after the backup was made. And it contains schedules that moved away afterwards.

A call of an operator took effect at some moment between its beginning and its answer. If it was not answered, it may
have taken effect at any later time. So a pause is certain only until the first unanswered call that may have resumed
the schedule. Instants are certain only until the first unanswered call that may have altered the schedule. Operators
make one call after another. Operators and shards have the same clock, because all processes of a run are on one
machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from proof.checker import backfills
from proof.checker.backup import Backup
from proof.checker.evidence import ChangeKind, Evidence, Run, RunName, Schedule, StoredSchedule, Violation
from proof.checker.schedule_terms import RUNS_KEPT, certain_pauses, find_instants, in_force, latest_us


def check(evidence: Evidence) -> Iterator[Violation]:
    backup = Backup(evidence)
    stored: defaultdict[tuple[str, str], list[StoredSchedule]] = defaultdict(list)
    for one in evidence.stored_schedules:
        stored[one.org, one.name].append(one)
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    for run in evidence.runs:
        runs[run.schedule_id].append(run)
    jobs: defaultdict[tuple[str, str], dict[str, RunName]] = defaultdict(dict)
    for row in evidence.rows:
        if row.run is not None:
            jobs[row.org, row.run.schedule][row.job] = row.run
    for schedule in evidence.schedules:
        name = (schedule.org, schedule.name)
        copies = stored.pop(name, [])
        lost = [one for one in backup.lost_schedules if (one.org, one.name) == name]
        if len(copies) > 1 or (schedule.acknowledged and not copies):
            is_second = len(copies) == 2 and bool(backup.second_schedules & set(copies))
            yield Violation(
                invariant="I10",
                what=f"{_named(schedule)} is stored {len(copies)} times",
                excused=is_second or (bool(lost) and not copies),
            )
        if schedule.denied:
            what = f"{_named(schedule)}: {schedule.denied} calls were told that it does not exist"
            yield Violation(invariant="I10", what=what)
        copies = copies or lost
        if copies:
            of_it, mine = runs[copies[0].id], jobs.pop(name, {})
            yield from _decided(evidence, backup, schedule, copies[0], of_it, mine)
            yield from _triggered(schedule, of_it)
    for org, what in [*stored, *jobs]:
        yield Violation(
            invariant="I10", what=f"schedule {what} of {org}, or a job of it, is stored, and nobody created it"
        )


def _decided(
    evidence: Evidence,
    backup: Backup,
    schedule: Schedule,
    stored: StoredSchedule,
    runs: Sequence[Run],
    jobs: Mapping[str, RunName],
) -> Iterator[Violation]:
    must, may = find_instants(schedule, stored.created_us)
    pauses = certain_pauses(schedule.changes)
    # For each instant, what the schedule itself decided: the id of a job, or the reason of a skip. "" stands for a run
    # that still waits.
    decided: defaultdict[int, set[str]] = defaultdict(set)
    own, backfilled = backfills.split(runs)
    for run in runs:
        yield from _jobless(backup, schedule, run, jobs)
    for run in own:
        yield from (_wrong(schedule, run.at_us, what) for what in _faults(schedule, run, pauses))
        if run.request is None:
            last_us = run.through_us or run.at_us
            for at_us in {run.at_us, last_us, *(one for one in may if run.at_us < one < last_us)}:
                decided[at_us].add(run.job or run.skipped_for or "")
    settled = {run.at_us for run in backfilled if run.job or run.skipped_for}
    settled |= {at_us for at_us, fates in decided.items() if fates - {""}}
    for at_us in sorted({*decided, *(run.at_us for run in backfilled)} - settled):
        if evidence.calm_s is not None:
            yield _wrong(schedule, at_us, "its run still waits")
    for at_us in sorted(must - decided.keys() - {run.at_us for run in backfilled}):
        yield _wrong(schedule, at_us, "it was neither stored nor skipped")
    for at_us, fates in sorted(decided.items()):
        # If a run has waited, its second record was made when the run was stored.
        last = fates - {""}
        if at_us not in may:
            yield _wrong(schedule, at_us, "its calendar has no such instant")
        if len(last) > 1:
            yield _wrong(schedule, at_us, f"it was decided {len(last)} times: {', '.join(sorted(last))}")
        if last != {"pause"} and any(begin < at_us < end for begin, end in pauses):
            yield _wrong(schedule, at_us, "it is an instant of a pause, and was not skipped for that")
    for at_us, what in backfills.check(schedule, runs, decided, pauses):
        yield _wrong(schedule, at_us, what)
    known = {run.job for run in runs}
    for job, name in jobs.items():
        if job not in known:
            yield _wrong(schedule, name.at_us, f"job {job} says that it is of this run, and no run says so")


def _faults(schedule: Schedule, run: Run, pauses: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yields what is wrong with one decision."""
    if run.job is not None and run.request is None and any(begin < run.decided_us < end for begin, end in pauses):
        yield f"job {run.job} was stored during a pause"
    if run.skipped_for is None:
        return
    reasons = {reason for one in in_force(schedule, run.decided_us) for reason in one.skips_for}
    if run.at_us <= latest_us(schedule.changes, ChangeKind.PAUSE, ChangeKind.RESUME):
        reasons.add("pause")
    # When a schedule is altered, it skips instants that are due but not decided yet.
    if run.at_us <= latest_us(schedule.changes, ChangeKind.ALTER, ChangeKind.ALTER):
        reasons.add("catch_up")
    if run.skipped_for not in reasons:
        yield f"it was skipped for {run.skipped_for}, for which it may not be skipped"


def _jobless(backup: Backup, schedule: Schedule, run: Run, jobs: Mapping[str, RunName]) -> Iterator[Violation]:
    """Yields a violation if the job of this run does not exist, names another run, or was stored under wrong terms."""
    if run.job is None:
        return
    name = jobs.get(run.job)
    if name is None or name.at_us != run.at_us:
        excused = name is None and backup.lacks(run.job)
        yield _wrong(schedule, run.at_us, f"{run.job} is no job of this run", excused=excused)
    elif name.terms not in {one.number for one in in_force(schedule, run.decided_us)}:
        what = f"job {run.job} was stored by terms {name.terms}, which were not in force any more"
        yield _wrong(schedule, run.at_us, what)


def _triggered(schedule: Schedule, runs: Sequence[Run]) -> Iterator[Violation]:
    """Checks that each call that triggers a run has stored one job, no matter how often the call was repeated."""
    of_request: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for run in runs:
        if run.request is not None:
            of_request[run.request][run.job or ""] = run.at_us
    for request, jobs in schedule.triggers.items():
        made = of_request.pop(request, {})
        for job in set(jobs) - made.keys():
            yield Violation(
                invariant="I10", what=f"{_named(schedule)}: its run with job {job}, which was triggered, is not stored"
            )
        for first_us, second_us in pairwise(sorted(made.values())):
            # A repeated call is recognised as long as the run that it triggered is among the newest runs.
            if len({run.at_us for run in runs if first_us < run.at_us < second_us}) < RUNS_KEPT:
                yield _wrong(schedule, second_us, f"the run that call {request} had triggered was stored again")
    for request, made in of_request.items():
        yield _wrong(schedule, min(made.values()), f"it was triggered by call {request}, which nobody made")


def _wrong(schedule: Schedule, at_us: int, what: str, *, excused: bool = False) -> Violation:
    what = f"{_named(schedule)}, instant {at_us / 1e6:f}: {what}"
    return Violation(invariant="I10", what=what, excused=excused)


def _named(schedule: Schedule) -> str:
    return f"schedule {schedule.name} of {schedule.org}"
