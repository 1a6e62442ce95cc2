"""`windrow jobs`: cancels and alters jobs, redrives dead jobs, and restores finished and dead jobs.

Jobs are named by their ids, or by conditions. With conditions, a command counts the jobs, asks for confirmation, and
changes the jobs in small steps with pauses (clients/python/windrow/job_changes.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import options, output, values
from cli.exits import CommandFailed, ExitCode
from cli.layout import App

if TYPE_CHECKING:
    from windrow import Answer, BulkChange, JobFilter, JobRecord, SyncClient

_BATCH = 1000
# The limit of one purge call: a larger call would hold its locks for too long.
_PURGE_MAX = 1000


class State(StrEnum):
    """The states in which jobs can be changed."""

    BLOCKED = "blocked"
    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    DEAD = "dead"


IdsOrNone = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Job ids; - reads them from standard input.", show_default=False),
]
OfQueue = Annotated[str, typer.Option("--queue", metavar="QUEUE", show_default=False, help="Only jobs of this queue.")]
States = Annotated[
    list[State] | None,
    typer.Option(
        "--state",
        metavar="STATE",
        show_default="all that can be changed",
        help="Only jobs in this state; may be repeated.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count the jobs, and show the first few.")]


def add_to(jobs: App) -> None:
    for command in (cancel, alter, redrive, restore, purge):
        jobs.command()(command)


def cancel(
    org: options.Org,
    ids: IdsOrNone = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", show_default=False, help="Stored with the jobs.")
    ] = "",
    queue: OfQueue = "",
    kind: options.Kind = "",
    where: options.Where = None,
    states: States = None,
    made_after: options.MadeAfter = None,
    made_before: options.MadeBefore = None,
    limit: options.Limit = None,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Cancels jobs that have not finished, by their ids or by what they have in common, and ends their leases.

    Without ids, give at least one of --queue, --kind, --where, --made-after and --made-before: the command counts the
    jobs, asks, and cancels the jobs that were made before it began, in small steps with pauses. The time when a job was
    made is in its id, by its producer's clock; the command compares it with the clock of this machine. If it is
    interrupted, repeat it: cancelled jobs stay cancelled. It may miss a job whose state changes meanwhile; then repeat
    it, too.

    Exit code 1: a job named by its id has succeeded; 4: the org has no such job or queue. The other jobs are cancelled.
    """
    change = _Change(
        verb="cancel",
        done="cancelled",
        answers={"ok": "cancelled", "stale": "has finished", "not_found": "not found"},
        by_ids=lambda client, part: client.cancel_jobs(part, reason=reason),
        by_filter=lambda client: partial(client.cancel_where, reason=reason),
    )
    conditions = _conditions(queue, kind, where, states, made_after, made_before)
    how = _How(limit=limit, dry_run=dry_run, yes=yes, as_json=as_json, address=address, timeout=timeout)
    _carry_out(change, org, ids, conditions, how)


def alter(
    org: options.Org,
    ids: IdsOrNone = None,
    delay: options.Delay = None,
    run_at: options.RunAt = None,
    priority: options.Priority = None,
    attribute: options.Attributes = None,
    queue: OfQueue = "",
    kind: options.Kind = "",
    where: options.Where = None,
    states: States = None,
    made_after: options.MadeAfter = None,
    made_before: options.MadeBefore = None,
    limit: options.Limit = None,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Changes jobs that are blocked, scheduled or ready: when they run, their priority, their attributes (--attribute
    replaces all that they have). A blocked job has no time yet, so --delay and --run-at do not change it.

    Jobs are named by their ids, or by conditions, as for `windrow jobs cancel`. A command that was interrupted can be
    repeated: it skips jobs that are already changed. Only --delay postpones such jobs again; --run-at does not.

    Exit code 1: a job named by its id is leased or dead, or has finished; 4: the org has no such job or queue. The
    other jobs are changed.
    """
    if delay is not None and run_at is not None:
        raise typer.BadParameter("give one of --delay and --run-at, not both", param_hint="'--run-at'")
    if delay is None and run_at is None and priority is None and not attribute:
        hint = "'--delay' / '--run-at' / '--priority' / '--attribute'"
        raise typer.BadParameter("no change is given: give at least one of these", param_hint=hint)
    attributes = values.attributes(attribute) if attribute else None
    altered: dict[str, Any] = {"priority": priority or 0, "run_at": run_at, "delay": delay, "attributes": attributes}
    change = _Change(
        verb="change",
        done="changed",
        answers={
            "ok": "changed",
            "stale": "not changed: it is leased or dead, or has finished",
            "cancelled": "not changed: it was cancelled",
            "not_found": "not found",
        },
        by_ids=lambda client, part: client.alter_jobs(part, **altered),
        by_filter=lambda client: partial(client.alter_where, **altered),
    )
    conditions = _conditions(queue, kind, where, states, made_after, made_before)
    how = _How(limit=limit, dry_run=dry_run, yes=yes, as_json=as_json, address=address, timeout=timeout)
    _carry_out(change, org, ids, conditions, how)


def redrive(
    org: options.Org,
    ids: IdsOrNone = None,
    queue: OfQueue = "",
    kind: options.Kind = "",
    where: options.Where = None,
    made_after: options.MadeAfter = None,
    made_before: options.MadeBefore = None,
    died_after: options.DiedAfter = None,
    died_before: options.DiedBefore = None,
    not_killed: options.NotKilled = False,
    per_second: Annotated[
        float | None,
        typer.Option(
            "--per-second",
            metavar="N",
            min=0.001,
            max=100_000,
            show_default=False,
            help="Only so many become due in a second, the first death first; the others are scheduled until then.",
        ),
    ] = None,
    limit: options.Limit = None,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Makes dead jobs ready again, with all their attempts.

    Jobs are named by their ids, or by conditions, as for `windrow jobs cancel`. The newest jobs come first; with
    --per-second, the jobs that died first. If the command is interrupted, repeat it; --died-before leaves out jobs that
    have died again since.

    Exit code 1: a job named by its id is not dead; 4: the org has no such job or queue. The other jobs are redriven.
    """
    change = _Change(
        verb="redrive",
        done="redriven",
        answers={
            "ok": "redriven",
            "stale": "not redriven: it is not dead",
            "cancelled": "not redriven: it was cancelled",
            "not_found": "not found",
        },
        by_ids=lambda client, part: client.redrive_jobs(part),
        by_filter=lambda client: client.redrive_where,
    )
    conditions = _conditions(queue, kind, where, None, made_after, made_before, died_after, died_before)
    if not_killed:
        conditions["not_killed"] = True
    if per_second:
        others = conditions.keys() - {"queue", "kind", "died_after", "died_before"}
        if ids or others or not queue:
            why = "it needs --queue, and takes no conditions besides --kind, --died-after and --died-before"
            raise typer.BadParameter(why, param_hint="'--per-second'")
        slowly = {name: conditions[name] for name in ("kind", "died_after", "died_before") if name in conditions}

        # Redrives the jobs in the order in which they died. Needs few statements, and reads no jobs.
        def at_once(client: SyncClient, rate: float = per_second) -> int:
            return client.redrive_queue(queue, limit=limit, per_second=rate, **slowly)

        change = replace(change, at_once=at_once)
    how = _How(limit=limit, dry_run=dry_run, yes=yes, as_json=as_json, address=address, timeout=timeout)
    _carry_out(change, org, ids, conditions, how)


def restore(
    org: options.Org,
    ids: options.Ids,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="ID",
            show_default=False,
            help="Make the copies' ids from this UUIDv7, so that the same list of jobs is restored only once.",
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stores copies of finished and dead jobs as new jobs that are due now; the old jobs stay as they are.

    A copy has the old job's queue, kind, payload, attributes, priority and retry policy. Its attribute
    windrow.restored_from is the old job's id. Jobs of nodes that waited for signals are refused, because they never
    run. If the command is interrupted, it says how to repeat it without a second copy. Exit code 1: a job is neither
    finished nor dead, or is refused; 4: the org has no such job.
    """
    from cli.calls import connect
    from cli.messages import restore_answer
    from windrow.ids import nth_id, uuid7
    from windrow.v1 import admin_pb2

    (batch_id,) = values.job_ids([batch]) if batch else [uuid7()]
    hint = f"repeat the command with --batch {batch_id} and the same ids: what is restored is not restored again"
    wanted = list(dict.fromkeys(values.job_ids(values.words(ids, sys.stdin))))
    answers: set[str] = set()
    with connect(address, timeout) as router:
        for at in range(0, len(wanted), _BATCH):
            part = wanted[at : at + _BATCH]
            # Make the new ids from the batch's id, so that a repeated command stores nothing twice.
            jobs = [admin_pb2.RestoreJob(id=one, new_id=nth_id(batch_id, n)) for n, one in enumerate(part, at)]
            request = admin_pb2.RestoreJobsRequest(org=org, jobs=jobs)
            try:
                results = router.call(router.admin.RestoreJobs, request).results
            except CommandFailed as error:
                raise CommandFailed(str(error), error.code, particulars=[*error.particulars, hint]) from error
            except KeyboardInterrupt:
                output.note(hint)
                raise
            found = [(job_id, restore_answer(one), one.restored.id) for job_id, one in zip(part, results, strict=True)]
            answers.update(answer for _, answer, _ in found)
            if as_json:
                output.say_json(
                    {"id": job_id, "answer": answer, "new_id": new_id or None} for job_id, answer, new_id in found
                )
            else:
                words = {
                    "ok": "restored as ",
                    "live": "is live",
                    "not_found": "not found",
                    "bad_id": "not restored: this machine's clock and the shard's are too far apart",
                    "signal": "not restored: its node waited for a signal, and such a job never runs",
                }
                output.say("\n".join(f"{job_id}  {words[answer]}{new_id}" for job_id, answer, new_id in found))
    if answers & {"live", "bad_id", "signal"}:
        raise typer.Exit(ExitCode.NO)
    if "not_found" in answers:
        raise typer.Exit(ExitCode.NOT_FOUND)


def purge(
    org: options.Org,
    queue: options.Queue,
    dead: Annotated[bool, typer.Option("--dead", help="Cancel the queue's dead jobs too.")] = False,
    limit: options.Limit = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Cancels a queue's waiting jobs; leased jobs may finish.

    Asks for confirmation. A script must give --yes.
    """
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        stats = router.call(router.admin.GetStats, admin_pb2.GetStatsRequest(org=org, queue=queue)).queues[0]
        waiting = min(stats.ready + stats.scheduled + stats.blocked + (stats.dead if dead else 0), limit or sys.maxsize)
        if not yes and waiting:
            if not sys.stdin.isatty():
                would = f"this would cancel {output.counted(waiting, 'job')} of queue {queue!r}"
                raise CommandFailed(f"{would}: confirm with --yes", ExitCode.USAGE)
            typer.confirm(
                f"Cancel {output.counted(waiting, 'job')} of queue {queue!r} of org {org!r}?", abort=True, err=True
            )
        done, left = 0, limit or sys.maxsize
        try:
            with output.working("cancelling") as status:
                while left:
                    request = admin_pb2.PurgeQueueRequest(
                        org=org, queue=queue, include_dead=dead, limit=min(left, _PURGE_MAX)
                    )
                    response = router.call(router.admin.PurgeQueue, request)
                    done, left = done + response.cancelled, left - response.cancelled
                    if status is not None:
                        status.update(f"{done:,} cancelled")
                    if not response.limit_reached:
                        break
        finally:
            # Report the jobs that are already cancelled, also after an error or Ctrl-C.
            _report({"cancelled": done}, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The change that a command makes to jobs."""

    # A verb for what the command does, such as "cancel", and its participle, such as "cancelled".
    verb: str
    done: str
    # The words that the command prints for each answer about a named job.
    answers: Mapping[str, str]
    by_ids: Callable[[SyncClient, Sequence[str]], list[Answer]]
    by_filter: Callable[[SyncClient], Callable[..., BulkChange]]
    # Changes all jobs that meet the conditions, and returns how many it changed. If this is None, the command changes
    # the jobs page by page.
    at_once: Callable[[SyncClient], int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """The options that the commands share."""

    limit: int | None
    dry_run: bool
    yes: bool
    as_json: bool
    address: str
    timeout: timedelta


def _conditions(
    queue: str,
    kind: str,
    where: Sequence[str] | None,
    states: Sequence[State] | None,
    made_after: datetime | None,
    made_before: datetime | None,
    died_after: datetime | None = None,
    died_before: datetime | None = None,
) -> dict[str, Any]:
    """Returns the conditions that are given, as fields of a JobFilter."""
    fields = {
        "queue": queue,
        "kind": kind,
        "attributes": values.attributes(where or (), option="--where"),
        "states": states,
        "created_after": made_after,
        "created_before": made_before,
        "died_after": died_after,
        "died_before": died_before,
    }
    return {name: value for name, value in fields.items() if value}


def _carry_out(change: _Change, org: str, ids: Sequence[str] | None, conditions: dict[str, Any], how: _How) -> None:
    from cli.calls import connect_client
    from cli.messages import no_queues
    from windrow import JobFilter, JobState

    states = [JobState(state.value) for state in conditions.pop("states", ())]
    found = JobFilter(**conditions, states=states)
    if ids and not found.is_empty:
        raise typer.BadParameter("job ids and conditions are both given: give one of them", param_hint="'ID'")
    if not ids and found.is_empty:
        # --state and --not-killed are not enough: without another condition they would select nearly every job of the
        # org.
        raise typer.BadParameter(
            "neither job ids nor conditions are given: give ids, or at least one of --queue, --kind, --where and the "
            "times",
            param_hint="'ID'",
        )
    if ids:
        narrower = {
            "--state": states,
            "--not-killed": found.not_killed,
            "--limit": how.limit,
            "--dry-run": how.dry_run,
        }
        for option, given in narrower.items():
            if given:
                raise typer.BadParameter(
                    "it belongs to conditions such as --queue, not to ids", param_hint=f"'{option}'"
                )
        wanted = values.job_ids(values.words(ids, sys.stdin), instead="; a queue is named by --queue")
        with connect_client(how.address, org, how.timeout) as client:
            _change_named(client, change, wanted, as_json=how.as_json)
        return
    # Leave out jobs that are made while the command runs, because the preview has not counted them. The clock of this
    # machine is as good for this as a router's clock, because the time in a job's id comes from its producer's clock.
    found = replace(found, created_before=found.created_before or datetime.now(UTC))
    with connect_client(how.address, org, how.timeout) as client:
        total = None
        if how.dry_run or not how.yes:
            total = _preview(client, change, found, org, how)
        if not how.dry_run and total != 0:
            total = _change_found(client, change, found, how, total)
        elif not how.dry_run:
            # The preview found no job. Even if some jobs meet the conditions now, do not change them, because the user
            # has not confirmed that.
            _report({change.done: 0, "skipped": 0}, as_json=how.as_json)
        if total == 0 and not client.list_queues():
            output.note(no_queues(org))
        if total == 0:
            note_fields_among(found.attributes)


def note_fields_among(keys: Iterable[str]) -> None:
    """Prints a hint for each key of --where that is also the name of a job's field. Call this when a command has found
    no job."""
    for hint in values.fields_among(keys):
        output.note(hint)


def _change_named(client: SyncClient, change: _Change, ids: Sequence[str], *, as_json: bool) -> None:
    answers: set[str] = set()
    for at in range(0, len(ids), _BATCH):
        batch = ids[at : at + _BATCH]
        found = [answer.value for answer in change.by_ids(client, batch)]
        answers.update(found)
        pairs = zip(batch, found, strict=True)
        if as_json:
            output.say_json({"id": job_id, "answer": answer} for job_id, answer in pairs)
        else:
            output.say("\n".join(f"{job_id}  {change.answers[answer]}" for job_id, answer in pairs))
    if answers & {"stale", "cancelled"}:
        raise typer.Exit(ExitCode.NO)
    if "not_found" in answers:
        raise typer.Exit(ExitCode.NOT_FOUND)


def _preview(client: SyncClient, change: _Change, where: JobFilter, org: str, how: _How) -> int:
    """Counts the jobs. In a dry run, prints the result. Otherwise asks the user for a confirmation, and ends the
    command if the user says no."""
    with output.working("counting"):
        preview = change.by_filter(client)(where, limit=how.limit, dry_run=True)
    would = f"{output.counted(preview.found, 'job')} of org {org!r}"
    first = ["  ".join([job.id, job.queue, job.state.value, job.kind, *_why(job)]) for job in preview.first]
    if preview.found > len(first):
        first.append(f"and {preview.found - len(first):,} more")
    if how.dry_run and how.as_json:
        output.say_json([{"found": preview.found, "first": [job.id for job in preview.first]}])
    elif how.dry_run:
        output.say("\n".join([f"would {change.verb} {would}", *(f"  {output.visible(line)}" for line in first)]))
    elif preview.found:
        if not sys.stdin.isatty():
            raise CommandFailed(
                f"this would {change.verb} {would}: confirm with --yes", ExitCode.USAGE, particulars=first
            )
        output.note("\n".join(first))
        typer.confirm(f"{change.verb.capitalize()} {would}?", abort=True, err=True)
    return preview.found


def _why(job: JobRecord) -> list[str]:
    """Returns why a job is dead, as one line for a list. Empty if the job is not dead."""
    from cli.messages import first_line

    failure = job.attempts[-1].failure if job.attempts else None
    why = ": ".join(filter(None, (first_line(job.reason), failure.summary if failure else "")))
    return [why] if why and job.state.value == State.DEAD else []


def _change_found(client: SyncClient, change: _Change, where: JobFilter, how: _How, total: int | None) -> int:
    """Changes the jobs. Returns how many met the conditions."""
    if change.at_once is not None:
        changed = change.at_once(client)
        _report({change.done: changed, "skipped": 0}, as_json=how.as_json)
        return changed
    counts = {change.done: 0, "skipped": 0}
    try:
        with output.counting_to(total, change.done) as show:

            def note(so_far: BulkChange) -> None:
                counts.update({change.done: so_far.changed, "skipped": so_far.skipped})
                show(so_far.changed)

            return change.by_filter(client)(where, limit=how.limit, on_progress=note).found
    finally:
        # Report the jobs that are already changed, also after an error or Ctrl-C.
        _report(counts, as_json=how.as_json)


def _report(counts: Mapping[str, int], *, as_json: bool) -> None:
    if as_json:
        output.say_json([counts])
    else:
        output.say(", ".join(f"{count} {what}" for what, count in counts.items() if count or what != "skipped"))
