"""`windrow jobs`: look at jobs where they are, and mend what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options, output, values
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from cli.calls import Router
    from windrow.v1 import admin_pb2, job_pb2

_BATCH = 1000
_PAGE_MAX = 1000
# Of one purge or redrive: longer, and it would hold its locks for too long.
_CHANGE_MAX = 1000

app = App(help="Look at jobs, cancel them, bring dead and finished ones back.")


class State(StrEnum):
    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    DEAD = "dead"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    ALL = "all"


_UNFINISHED = (State.READY, State.LEASED, State.SCHEDULED, State.DEAD)
Kind = Annotated[str, typer.Option("--kind", metavar="KIND", show_default=False, help="Only jobs of this kind.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, show_default="all", help="At most so many.")]


@app.command()
def get(
    org: options.Org,
    ids: options.Ids,
    payload: Annotated[
        bool, typer.Option("--payload/--no-payload", help="Payloads and results too.", show_default=True)
    ] = True,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Show everything about jobs, wherever they are, with the history of their attempts."""
    from cli.calls import connect
    from cli.messages import job_json
    from windrow.v1 import queue_pb2

    wanted = values.job_ids(values.words(ids, sys.stdin))
    missing: list[str] = []
    away: set[str] = set()
    shown = 0
    with connect(address, timeout) as router:
        while wanted:
            request = queue_pb2.GetJobsRequest(org=org, ids=wanted[:_BATCH], include_payload=payload)
            response = router.call(router.queue.GetJobs, request)
            missing += response.not_found
            away.update(response.unavailable_shards)
            wanted = [*response.left_out, *wanted[_BATCH:]]
            if as_json:
                output.say_json(job_json(job, payloads=payload) for job in response.jobs)
                continue
            for job in response.jobs:
                if shown:
                    output.say("")
                _print_job(job)
                shown += 1
    output.refuse_away(away)
    if missing:
        raise CommandFailed(f"org {org!r} has no job {', '.join(missing)}", ExitCode.NOT_FOUND)


@app.command("list")
def list_jobs(
    org: options.Org,
    queue: Annotated[str, typer.Argument(metavar="[QUEUE]", help="Only of this queue.", show_default=False)] = "",
    states: Annotated[
        list[State] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            show_default="ready, leased, scheduled, dead",
            help="scheduled, ready, leased, dead, succeeded or cancelled; may be repeated. all: any, newest first.",
        ),
    ] = None,
    kind: Kind = "",
    made_after: Annotated[
        datetime | None,
        typer.Option("--made-after", parser=values.moment, metavar="TIME", show_default=False, help="Not earlier."),
    ] = None,
    made_before: Annotated[
        datetime | None,
        typer.Option("--made-before", parser=values.moment, metavar="TIME", show_default=False, help="Earlier."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most so many a state.")] = 50,
    payload: Annotated[bool, typer.Option("--payload", help="Payloads too (with --json).")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """List jobs by state, of one queue or all, without taking them."""
    from cli.calls import connect
    from cli.messages import job_json, timestamp
    from windrow.v1 import admin_pb2

    wanted = admin_pb2.ListJobsRequest(org=org, queue=queue, kind=kind, include_payload=payload)
    if made_after is not None:
        wanted.made_after.CopyFrom(timestamp(made_after))
    if made_before is not None:
        wanted.made_before.CopyFrom(timestamp(made_before))
    found: list[job_pb2.Job] = []
    more: list[str] = []
    away: set[str] = set()
    with connect(address, timeout) as router:
        for state in states or _UNFINISHED:
            for page, is_cut in _pages(router, wanted, state, limit=limit, away=away):
                if as_json:
                    output.say_json(job_json(job, payloads=payload) for job in page)
                else:
                    found += page
                if is_cut:
                    more.append(state)
    if found:
        _print_jobs(found, queues=not queue)
    elif not as_json:
        output.note(f"no such jobs in queue {queue!r} of org {org!r}" if queue else f"org {org!r} has no such jobs")
    if State.ALL in more:
        output.note("there are more: raise --limit")
    elif more:
        output.note(f"there are more that are {', '.join(more)}: raise --limit")
    output.refuse_away(away)


def _pages(
    router: Router, wanted: admin_pb2.ListJobsRequest, state: State, *, limit: int, away: set[str]
) -> Iterator[tuple[Sequence[job_pb2.Job], bool]]:
    """The jobs in one state, page by page, and with each whether the limit has cut off more. Shards that did not answer
    are added to `away`."""
    from cli.messages import STATES
    from windrow.v1 import admin_pb2

    token, left = "", limit
    while left:
        request = admin_pb2.ListJobsRequest(page_size=min(left, _PAGE_MAX), page_token=token)
        request.MergeFrom(wanted)
        if state is not State.ALL:
            request.state = STATES[state]
        response = router.call(router.admin.ListJobs, request)
        left -= len(response.jobs)
        token = response.next_page_token
        away.update(response.unavailable_shards)
        yield response.jobs, bool(token) and not left
        if not token:
            return


@app.command()
def cancel(
    org: options.Org,
    ids: options.Ids,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", show_default=False, help="Kept with the jobs.")
    ] = "",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Cancel jobs that have not finished; a lease on one ends."""
    from cli.calls import connect
    from cli.messages import ANSWERS
    from windrow.v1 import queue_pb2

    wanted = values.job_ids(values.words(ids, sys.stdin))
    answers: list[str] = []
    with connect(address, timeout) as router:
        for at in range(0, len(wanted), _BATCH):
            batch = wanted[at : at + _BATCH]
            request = queue_pb2.CancelJobsRequest(org=org, ids=batch, reason=reason)
            found = [ANSWERS[one] for one in router.call(router.queue.CancelJobs, request).answers]
            answers += found
            pairs = list(zip(batch, found, strict=True))
            if as_json:
                output.say_json({"id": job_id, "answer": answer} for job_id, answer in pairs)
            else:
                words = {"ok": "cancelled", "stale": "has finished", "not_found": "not found"}
                output.say("\n".join(f"{job_id}  {words[answer]}" for job_id, answer in pairs))
    if "stale" in answers:
        raise typer.Exit(ExitCode.NO)
    if "not_found" in answers:
        raise typer.Exit(ExitCode.NOT_FOUND)


@app.command()
def redrive(
    org: options.Org,
    queue: options.Queue,
    kind: Kind = "",
    died_after: Annotated[
        datetime | None,
        typer.Option("--died-after", parser=values.moment, metavar="TIME", show_default=False, help="Not earlier."),
    ] = None,
    died_before: Annotated[
        datetime | None,
        typer.Option("--died-before", parser=values.moment, metavar="TIME", show_default=False, help="Earlier."),
    ] = None,
    limit: Limit = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Bring dead jobs back to ready, with fresh attempts, oldest death first."""
    from cli.calls import connect
    from cli.messages import timestamp
    from windrow.v1 import admin_pb2

    request = admin_pb2.RedriveJobsRequest(org=org, queue=queue, kind=kind)
    if died_after is not None:
        request.died_after.CopyFrom(timestamp(died_after))
    if died_before is not None:
        request.died_before.CopyFrom(timestamp(died_before))
    with connect(address, timeout) as router, output.working("redriving") as status:
        # Those that are dead now: some may run and die again before the last of them is back.
        stats = router.call(router.admin.GetStats, admin_pb2.GetStatsRequest(org=org, queue=queue))
        left = min(stats.queues[0].dead, limit or sys.maxsize)
        done = 0
        while left:
            request.limit = min(left, _CHANGE_MAX)
            response = router.call(router.admin.RedriveJobs, request)
            done, left = done + response.redriven, left - response.redriven
            if status is not None:
                status.update(f"{done:,} redriven")
            if not response.more:
                break
    _report("redriven", done, as_json=as_json)


@app.command()
def restore(
    org: options.Org,
    ids: options.Ids,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Store finished and dead jobs once more, as new jobs that are due now; the old ones stay as they are."""
    from cli.calls import connect
    from cli.messages import RESTORE_ANSWERS
    from windrow.ids import uuid7
    from windrow.v1 import admin_pb2

    wanted = list(dict.fromkeys(values.job_ids(values.words(ids, sys.stdin))))
    answers: set[str] = set()
    with connect(address, timeout) as router:
        for at in range(0, len(wanted), _BATCH):
            batch = wanted[at : at + _BATCH]
            # Made here, so that a call that is made again stores nothing twice.
            jobs = [admin_pb2.RestoreJob(id=job_id, new_id=uuid7()) for job_id in batch]
            results = router.call(router.admin.RestoreJobs, admin_pb2.RestoreJobsRequest(org=org, jobs=jobs)).results
            found = [(job_id, RESTORE_ANSWERS[one.refusal], one.id) for job_id, one in zip(batch, results, strict=True)]
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
                }
                output.say("\n".join(f"{job_id}  {words[answer]}{new_id}" for job_id, answer, new_id in found))
    if answers & {"live", "bad_id"}:
        raise typer.Exit(ExitCode.NO)
    if "not_found" in answers:
        raise typer.Exit(ExitCode.NOT_FOUND)


@app.command()
def purge(
    org: options.Org,
    queue: options.Queue,
    dead: Annotated[bool, typer.Option("--dead", help="The queue's dead jobs too.")] = False,
    limit: Limit = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Cancel the jobs of a queue that wait; leased ones finish."""
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        stats = router.call(router.admin.GetStats, admin_pb2.GetStatsRequest(org=org, queue=queue)).queues[0]
        waiting = min(stats.ready + stats.scheduled + (stats.dead if dead else 0), limit or sys.maxsize)
        if not yes and waiting:
            if not sys.stdin.isatty():
                would = f"this would cancel {output.counted(waiting, 'job')} of queue {queue!r}"
                raise CommandFailed(f"{would}: say --yes if that is meant", ExitCode.USAGE)
            typer.confirm(
                f"Cancel {output.counted(waiting, 'job')} of queue {queue!r} of org {org!r}?", abort=True, err=True
            )
        done, left = 0, limit or sys.maxsize
        with output.working("cancelling") as status:
            while left:
                request = admin_pb2.PurgeQueueRequest(
                    org=org, queue=queue, include_dead=dead, limit=min(left, _CHANGE_MAX)
                )
                response = router.call(router.admin.PurgeQueue, request)
                done, left = done + response.cancelled, left - response.cancelled
                if status is not None:
                    status.update(f"{done:,} cancelled")
                if not response.more:
                    break
    _report("cancelled", done, as_json=as_json)


def _report(what: str, count: int, *, as_json: bool) -> None:
    if as_json:
        output.say_json([{what: count}])
    else:
        output.say(f"{count} {what}")


def _print_jobs(jobs: Sequence[job_pb2.Job], *, queues: bool) -> None:
    from cli.messages import state_name, time_shown

    columns = [
        Column(title="id"),
        *([Column(title="queue")] if queues else ()),
        Column(title="state", coloured=True),
        Column(title="attempt", right=True),
        Column(title="due / until / ended"),
        Column(title="kind"),
        Column(title="reason", detail=True),
    ]
    rows = [
        (
            job.id,
            *([job.queue] if queues else ()),
            state_name(job.state),
            f"{job.attempt}/{job.max_attempts}",
            time_shown(job, "finished_at") or time_shown(job, "lease_deadline") or time_shown(job, "run_at"),
            job.kind,
            ": ".join(filter(None, map(_first_line, (job.reason, job.attempts[-1].error if job.attempts else "")))),
        )
        for job in jobs
    ]
    output.table(columns, rows)


def _first_line(text: str) -> str:
    """Of an error: what went wrong. `jobs get` shows the rest, too."""
    return next(iter(text.strip().splitlines()), "")


def _print_job(job: job_pb2.Job) -> None:
    from cli.messages import bytes_shown, outcome_name, retry_policy, state_name, time_shown

    output.heading(job.id)
    output.facts(
        [
            ("state", state_name(job.state)),
            ("reason", job.reason),
            ("queue", job.queue),
            ("kind", job.kind),
            ("priority", str(job.priority)),
            ("attempt", f"{job.attempt} of {job.max_attempts}"),
            ("retry", values.retry_text(retry_policy(job.retry))),
            ("enqueued", time_shown(job, "enqueued_at")),
            ("due", time_shown(job, "run_at")),
            ("expires", time_shown(job, "expires_at")),
            ("leased until", time_shown(job, "lease_deadline")),
            ("worker", job.worker),
            ("finished", time_shown(job, "finished_at")),
            ("dedup key", job.dedup_key),
            ("attributes", "\n".join(f"{key}={value}" for key, value in sorted(job.attributes.items()))),
            ("shard", job.shard),
            ("payload", bytes_shown(job.payload)),
            ("result", bytes_shown(job.result)),
        ],
        indent=2,
    )
    if job.attempts:
        output.say("")
        columns = [
            Column(title="attempt", right=True),
            Column(title="outcome", coloured=True),
            Column(title="leased"),
            Column(title="lasted", right=True),
            Column(title="worker"),
            Column(title="error", detail=True),
        ]
        rows = [
            (
                str(attempt.attempt),
                outcome_name(attempt.outcome),
                time_shown(attempt, "leased_at"),
                values.rough(attempt.ended_at.ToDatetime() - attempt.leased_at.ToDatetime()),
                attempt.worker,
                attempt.error,
            )
            for attempt in job.attempts
        ]
        output.table(columns, rows, indent=2)
