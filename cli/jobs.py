"""`windrow jobs`: shows jobs, cancels them, and brings finished and dead jobs back."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
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
# The limit of one purge or redrive call: a larger one would hold its locks for too long.
_CHANGE_MAX = 1000
# The jobs of one step of a cancel by conditions. After a step the command rests for as long as the step took, because
# consumers come first.
_STEP_MAX = 100
# How long one call of `watch` waits for the job's end. After it the command looks for changes.
_WATCH_S = 1

app = App(help="Shows and cancels jobs, and runs dead and finished ones again.")


class State(StrEnum):
    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    DEAD = "dead"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    ALL = "all"


_ENDED = (State.SUCCEEDED, State.DEAD, State.CANCELLED)
_CANCELLED = {"ok": "cancelled", "stale": "has finished", "not_found": "not found"}
_ALTERED = {
    "ok": "changed",
    "stale": "not changed: it is leased or dead, or has finished",
    "cancelled": "not changed: it was cancelled",
    "not_found": "not found",
}
_UNFINISHED = (State.READY, State.LEASED, State.SCHEDULED, State.DEAD)
Kind = Annotated[str, typer.Option("--kind", metavar="KIND", show_default=False, help="Only jobs of this kind.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="KEY=VALUE",
        show_default=False,
        help="Only jobs with this attribute; may be repeated.",
    ),
]
States = Annotated[
    list[State] | None,
    typer.Option(
        "--state",
        metavar="STATE",
        show_default="ready, leased, scheduled, dead",
        help="scheduled, ready, leased, dead, succeeded or cancelled; may be repeated. all: any, newest first.",
    ),
]
MadeAfter = Annotated[
    datetime | None,
    typer.Option(
        "--made-after",
        parser=values.moment,
        metavar="TIME",
        show_default=False,
        help="Only jobs made at or after TIME.",
    ),
]
MadeBefore = Annotated[
    datetime | None,
    typer.Option(
        "--made-before",
        parser=values.moment,
        metavar="TIME",
        show_default=False,
        help="Only jobs made before TIME.",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, show_default="all", help="Change at most N jobs.")
]


@app.command()
def get(
    org: options.Org,
    ids: options.Ids,
    payload: Annotated[
        bool, typer.Option("--payload/--no-payload", help="Include payloads and results.", show_default=True)
    ] = True,
    stack: Annotated[bool, typer.Option("--stack", help="Show the stack of each failed attempt, too.")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Shows all details of jobs, including the history of their attempts and what these have logged.

    Finds jobs in every state, also cold ones. Exit code 4: the org has no such job.
    """
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
            missing += response.not_found_ids
            away.update(response.unavailable_shards)
            wanted = [*response.omitted_ids, *wanted[_BATCH:]]
            if as_json:
                output.say_json(job_json(job, payloads=payload) for job in response.jobs)
                continue
            for job in response.jobs:
                if shown:
                    output.say("")
                print_job(job, stacks=stack)
                shown += 1
    output.refuse_away(away)
    if missing:
        raise CommandFailed(
            f"org {org!r} has no job {', '.join(missing)}",
            ExitCode.NOT_FOUND,
            particulars=[
                "if it was exported and dropped: "
                f"windrow archive list {shlex.quote(org)} --id {missing[0]} --config FILE"
            ],
        )


@app.command()
def watch(
    org: options.Org,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The job's id.", show_default=False)],
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Prints a job's state, and each change of it and of its progress, until the job has ended.

    Then prints the result. Sees a change within a second, and the end at once. Exit code 1: the job is dead or
    cancelled; 4: the org has no such job.
    """
    from google.protobuf.duration_pb2 import Duration

    from cli.calls import connect
    from cli.messages import bytes_shown, job_json, state_name, watch_line
    from windrow.v1 import queue_pb2

    (wanted,) = values.job_ids([job_id])
    request = queue_pb2.WaitJobRequest(org=org, id=wanted, include_payload=True)
    shown = ""
    with connect(address, timeout) as router:
        while True:
            response = router.call(router.queue.WaitJob, request, wait_s=request.wait.seconds)
            if not response.HasField("job"):
                raise CommandFailed(f"org {org!r} has no job {wanted}", ExitCode.NOT_FOUND)
            # The first call does not wait: it shows the state now.
            request.wait.CopyFrom(Duration(seconds=_WATCH_S))
            job = response.job
            line = watch_line(job)
            if line != shown:
                shown = line
                if as_json:
                    output.say_json([job_json(job, payloads=True)])
                else:
                    output.say(output.visible(line))
            state = state_name(job.state)
            if state in _ENDED:
                break
    if job.result and not as_json:
        output.say(bytes_shown(job.result))
    if state != State.SUCCEEDED:
        raise typer.Exit(ExitCode.NO)


@app.command("list")
def list_jobs(
    org: options.Org,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Only jobs of this queue.", show_default=False)] = "",
    states: States = None,
    kind: Kind = "",
    where: Where = None,
    made_after: MadeAfter = None,
    made_before: MadeBefore = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Print at most N jobs per state.")] = 50,
    payload: Annotated[bool, typer.Option("--payload", help="Include payloads (with --json).")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists the jobs of one queue or of all queues, by state, without leasing them.

    Shows the first line of a job's latest error; `windrow jobs get` and --json have all of it. Exit code 3: a shard did
    not answer; the jobs of the others are listed.
    """
    from cli.calls import connect
    from cli.messages import job_json

    wanted = _wanted(org, queue, kind, where, made_after, made_before)
    wanted.include_payload = payload
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


def _wanted(
    org: str,
    queue: str,
    kind: str,
    where: Sequence[str] | None,
    made_after: datetime | None,
    made_before: datetime | None,
) -> admin_pb2.ListJobsRequest:
    from cli.messages import timestamp
    from windrow.v1 import admin_pb2

    attributes = values.attributes(where or (), option="--where")
    wanted = admin_pb2.ListJobsRequest(org=org, queue=queue, kind=kind, attributes=attributes)
    if made_after is not None:
        wanted.created_after.CopyFrom(timestamp(made_after))
    if made_before is not None:
        wanted.created_before.CopyFrom(timestamp(made_before))
    return wanted


def _pages(
    router: Router,
    wanted: admin_pb2.ListJobsRequest,
    state: State,
    *,
    limit: int,
    away: set[str],
    page_max: int = _PAGE_MAX,
) -> Iterator[tuple[Sequence[job_pb2.Job], bool]]:
    """Yields the jobs in one state, page by page, each with whether the limit cut off more jobs. Adds the shards that
    did not answer to `away`."""
    from windrow.v1 import admin_pb2, job_pb2

    token, left = "", limit
    while left:
        request = admin_pb2.ListJobsRequest(page_size=min(left, page_max), page_token=token)
        request.MergeFrom(wanted)
        if state is not State.ALL:
            request.state = job_pb2.JobState.Value(f"JOB_STATE_{state.name}")
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
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="Job ids; - reads them from standard input.", show_default=False),
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", show_default=False, help="Stored with the jobs.")
    ] = "",
    queue: Annotated[
        str, typer.Option("--queue", metavar="QUEUE", show_default=False, help="Only jobs of this queue.")
    ] = "",
    kind: Kind = "",
    where: Where = None,
    states: States = None,
    made_after: MadeAfter = None,
    made_before: MadeBefore = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not count and ask first.")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Cancels jobs that have not finished, by their ids or by what they have in common, and ends their leases.

    Without ids, give at least one of --queue, --kind, --where, --made-after and --made-before: the command counts the
    jobs, asks, and cancels those that were made before it began, in small steps with pauses. If it is interrupted,
    repeat it: what is cancelled stays so. A job whose state changes meanwhile may be missed; then repeat it, too.

    Exit code 1: a job has succeeded; 4: the org has no such job. The other jobs are cancelled.
    """
    from cli.calls import connect

    conditions = any((queue, kind, where, made_after, made_before))
    if bool(ids) == conditions:
        raise typer.BadParameter(
            "give job ids, or conditions such as --where campaign=42, and not both", param_hint="'ID'"
        )
    if ids:
        if states:
            raise typer.BadParameter("it belongs to conditions such as --queue, not to ids", param_hint="'--state'")
        wanted = values.job_ids(values.words(ids, sys.stdin))
        with connect(address, timeout) as router:
            _cancel_named(router, org, wanted, reason, as_json=as_json)
        return
    unfinished = states or _UNFINISHED
    if not set(unfinished) <= set(_UNFINISHED):
        raise typer.BadParameter(f"only {', '.join(_UNFINISHED)} jobs can be cancelled", param_hint="'--state'")
    # Not those that are stored while the command runs: it would not end, and nobody has counted them.
    searched = _wanted(org, queue, kind, where, made_after, made_before or datetime.now(UTC))
    with connect(address, timeout) as router:
        if not yes:
            count = sum(len(page) for page in _matching(router, searched, unfinished))
            if count and not sys.stdin.isatty():
                would = f"this would cancel {output.counted(count, 'job')} of org {org!r}"
                raise CommandFailed(f"{would}: confirm with --yes", ExitCode.USAGE)
            if count:
                typer.confirm(f"Cancel {output.counted(count, 'job')} of org {org!r}?", abort=True, err=True)
        done = 0
        try:
            with output.working("cancelling") as status:
                began_s = time.monotonic()
                for page in _matching(router, searched, unfinished, page_max=_STEP_MAX):
                    # An older router ignores the attributes that it is asked for.
                    meant = [job.id for job in page if searched.attributes.items() <= job.attributes.items()]
                    found = _cancel(router, org, meant, reason) if meant else []
                    done += found.count("ok")
                    time.sleep(time.monotonic() - began_s)
                    began_s = time.monotonic()
                    if status is not None:
                        status.update(f"{done:,} cancelled")
        finally:
            # Also after an error or Ctrl-C: these are cancelled.
            _report("cancelled", done, as_json=as_json)


def _matching(
    router: Router, wanted: admin_pb2.ListJobsRequest, states: Sequence[State], *, page_max: int = _PAGE_MAX
) -> Iterator[Sequence[job_pb2.Job]]:
    """Yields the jobs in these states, page by page. Raises CommandFailed if a shard does not answer."""
    for state in states:
        away: set[str] = set()
        for page, _ in _pages(router, wanted, state, limit=sys.maxsize, away=away, page_max=page_max):
            output.refuse_away(away)
            if page:
                yield page


def _cancel(router: Router, org: str, ids: Sequence[str], reason: str) -> list[str]:
    from cli.messages import ANSWERS
    from windrow.v1 import queue_pb2

    request = queue_pb2.CancelJobsRequest(org=org, ids=ids, reason=reason)
    return [ANSWERS[one] for one in router.call(router.queue.CancelJobs, request).answers]


def _cancel_named(router: Router, org: str, wanted: Sequence[str], reason: str, *, as_json: bool) -> None:
    answers: list[str] = []
    for at in range(0, len(wanted), _BATCH):
        batch = wanted[at : at + _BATCH]
        found = _cancel(router, org, batch, reason)
        answers += found
        _say_answers(batch, found, _CANCELLED, as_json=as_json)
    _exit_by(answers)


def _say_answers(ids: Sequence[str], answers: Sequence[str], words: Mapping[str, str], *, as_json: bool) -> None:
    pairs = zip(ids, answers, strict=True)
    if as_json:
        output.say_json({"id": job_id, "answer": answer} for job_id, answer in pairs)
    else:
        output.say("\n".join(f"{job_id}  {words[answer]}" for job_id, answer in pairs))


def _exit_by(answers: Sequence[str]) -> None:
    if "stale" in answers or "cancelled" in answers:
        raise typer.Exit(ExitCode.NO)
    if "not_found" in answers:
        raise typer.Exit(ExitCode.NOT_FOUND)


@app.command()
def alter(
    org: options.Org,
    ids: options.Ids,
    delay: Annotated[
        timedelta | None,
        typer.Option(
            "--delay",
            parser=values.duration,
            metavar="DURATION",
            show_default=False,
            help="Run the jobs after this time.",
        ),
    ] = None,
    run_at: Annotated[
        datetime | None,
        typer.Option(
            "--run-at", parser=values.moment, metavar="TIME", show_default=False, help="Run the jobs at TIME."
        ),
    ] = None,
    priority: Annotated[
        int, typer.Option("--priority", metavar="1-9", min=1, max=9, show_default=False, help="1 runs first, 9 last.")
    ] = 0,
    attribute: Annotated[
        list[str] | None,
        typer.Option(
            "--attribute",
            metavar="KEY=VALUE",
            show_default=False,
            help="A label, instead of all that the jobs have; may be repeated.",
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Changes jobs that are scheduled or ready: when they run, their priority, their attributes.

    Exit code 1: a job is leased or dead, or has finished; 4: the org has no such job. The other jobs are changed.
    """
    if delay is not None and run_at is not None:
        raise typer.BadParameter("give one of --delay and --run-at, not both", param_hint="'--run-at'")
    if delay is None and run_at is None and not priority and not attribute:
        hint = "'--delay' / '--run-at' / '--priority' / '--attribute'"
        raise typer.BadParameter("nothing is to be changed: give at least one of these", param_hint=hint)

    from cli.calls import connect
    from cli.messages import ANSWERS, duration, timestamp
    from windrow.v1 import queue_pb2

    change = queue_pb2.AlterJobsRequest(org=org, priority=priority)
    if delay is not None:
        change.delay.CopyFrom(duration(delay))
    if run_at is not None:
        change.run_at.CopyFrom(timestamp(run_at))
    if attribute:
        change.attributes.values.update(values.attributes(attribute))
    wanted = values.job_ids(values.words(ids, sys.stdin))
    answers: list[str] = []
    with connect(address, timeout) as router:
        for at in range(0, len(wanted), _BATCH):
            batch = wanted[at : at + _BATCH]
            request = queue_pb2.AlterJobsRequest(ids=batch)
            request.MergeFrom(change)
            found = [ANSWERS[one] for one in router.call(router.queue.AlterJobs, request).answers]
            answers += found
            _say_answers(batch, found, _ALTERED, as_json=as_json)
    _exit_by(answers)


@app.command()
def redrive(
    org: options.Org,
    queue: options.Queue,
    kind: Kind = "",
    where: Where = None,
    died_after: Annotated[
        datetime | None,
        typer.Option(
            "--died-after",
            parser=values.moment,
            metavar="TIME",
            show_default=False,
            help="Only jobs that died at or after TIME.",
        ),
    ] = None,
    died_before: Annotated[
        datetime | None,
        typer.Option(
            "--died-before",
            parser=values.moment,
            metavar="TIME",
            show_default=False,
            help="Only jobs that died before TIME.",
        ),
    ] = None,
    limit: Limit = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Makes dead jobs ready again, with all their attempts; those that died first come first."""
    from cli.calls import connect
    from cli.messages import timestamp
    from windrow.v1 import admin_pb2

    attributes = values.attributes(where or (), option="--where")
    request = admin_pb2.RedriveJobsRequest(org=org, queue=queue, kind=kind, attributes=attributes)
    if died_after is not None:
        request.died_after.CopyFrom(timestamp(died_after))
    if died_before is not None:
        request.died_before.CopyFrom(timestamp(died_before))
    with connect(address, timeout) as router, output.working("redriving") as status:
        # Redrive only as many jobs as are dead now: some may run and die again during the command.
        stats = router.call(router.admin.GetStats, admin_pb2.GetStatsRequest(org=org, queue=queue))
        output.refuse_away(set(stats.unavailable_shards))
        left = min(stats.queues[0].dead, limit or sys.maxsize)
        done = 0
        while left:
            request.limit = min(left, _CHANGE_MAX)
            response = router.call(router.admin.RedriveJobs, request)
            done, left = done + response.redriven, left - response.redriven
            if status is not None:
                status.update(f"{done:,} redriven")
            if not response.limit_reached:
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
    """Stores copies of finished and dead jobs as new jobs that are due now; the old ones stay as they are.

    A copy has the old job's queue, kind, payload, attributes, priority and retry policy. Its attribute
    windrow.restored_from is the old job's id. Exit code 1: a job is neither finished nor dead; 4: the org has no such
    job.
    """
    from cli.calls import connect
    from cli.messages import restore_answer
    from windrow.ids import uuid7
    from windrow.v1 import admin_pb2

    wanted = list(dict.fromkeys(values.job_ids(values.words(ids, sys.stdin))))
    answers: set[str] = set()
    with connect(address, timeout) as router:
        for at in range(0, len(wanted), _BATCH):
            batch = wanted[at : at + _BATCH]
            # New ids are made here, so that a repeated call stores nothing twice.
            jobs = [admin_pb2.RestoreJob(id=job_id, new_id=uuid7()) for job_id in batch]
            results = router.call(router.admin.RestoreJobs, admin_pb2.RestoreJobsRequest(org=org, jobs=jobs)).results
            found = [(job_id, restore_answer(one), one.restored.id) for job_id, one in zip(batch, results, strict=True)]
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
    dead: Annotated[bool, typer.Option("--dead", help="Cancel the queue's dead jobs too.")] = False,
    limit: Limit = None,
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
        waiting = min(stats.ready + stats.scheduled + (stats.dead if dead else 0), limit or sys.maxsize)
        if not yes and waiting:
            if not sys.stdin.isatty():
                would = f"this would cancel {output.counted(waiting, 'job')} of queue {queue!r}"
                raise CommandFailed(f"{would}: confirm with --yes", ExitCode.USAGE)
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
                if not response.limit_reached:
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
            ": ".join(filter(None, map(_first_line, (job.reason, _last_failure(job))))),
        )
        for job in jobs
    ]
    output.table(columns, rows)


def _last_failure(job: job_pb2.Job) -> str:
    from cli.messages import failure_text

    return failure_text(job.attempts[-1].failure) if job.attempts else ""


def _first_line(text: str) -> str:
    """Returns the first line of a failure, which summarises it. `jobs get` shows all lines."""
    return next(iter(text.strip().splitlines()), "")


def print_job(job: job_pb2.Job, *, stacks: bool) -> None:
    from cli.messages import failure_text, job_facts, outcome_name, time_shown

    output.heading(job.id)
    output.facts(job_facts(job), indent=2)
    if job.attempts:
        output.say("")
        columns = [
            Column(title="attempt", right=True),
            Column(title="outcome", coloured=True),
            Column(title="leased"),
            Column(title="lasted", right=True),
            Column(title="worker"),
            Column(title="failure", detail=True),
        ]
        rows = [
            (
                str(attempt.attempt),
                outcome_name(attempt.outcome),
                time_shown(attempt, "leased_at"),
                values.rough(attempt.ended_at.ToDatetime() - attempt.leased_at.ToDatetime()),
                attempt.worker,
                failure_text(attempt.failure),
            )
            for attempt in job.attempts
        ]
        output.table(columns, rows, indent=2)
    for attempt in job.attempts:
        texts = [("log", attempt.log), *([("stack", attempt.failure.stack)] if stacks else [])]
        for what, text in texts:
            if text:
                output.say("")
                output.facts([(f"{what} of attempt {attempt.attempt}", text)], indent=2)
