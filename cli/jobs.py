"""`windrow jobs`: shows jobs. job_changes.py changes them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cli import job_changes, options, output, values
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from cli.calls import Router
    from windrow.v1 import admin_pb2, job_pb2

_BATCH = 1000
_PAGE_MAX = 1000
# How long one call of `watch` waits for the job's end. After each call, the command prints what has changed.
_WATCH_S = 1


class State(StrEnum):
    BLOCKED = "blocked"
    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    DEAD = "dead"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    ALL = "all"


_ENDED = (State.SUCCEEDED, State.DEAD, State.CANCELLED)
_UNFINISHED = (State.READY, State.LEASED, State.SCHEDULED, State.BLOCKED, State.DEAD)
States = Annotated[
    list[State] | None,
    typer.Option(
        "--state",
        metavar="STATE",
        show_default="ready, leased, scheduled, blocked, dead",
        help="blocked, scheduled, ready, leased, dead, succeeded, cancelled; may be repeated. all: any, newest first.",
    ),
]

OneId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.", show_default=False)]

app = App(help="Shows and changes jobs, and runs dead and finished ones again.")


@app.command()
def get(
    org: options.Org,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Job ids; - reads them from standard input.", show_default=False),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            "--key", metavar="KEY", show_default=False, help="Instead of ids: the job that has this dedup key now."
        ),
    ] = "",
    queue: Annotated[
        str, typer.Option("--queue", metavar="QUEUE", show_default=False, help="The queue of --key.")
    ] = "",
    payload: Annotated[
        bool, typer.Option("--payload/--no-payload", help="Include payloads and results.", show_default=True)
    ] = True,
    stack: Annotated[bool, typer.Option("--stack", help="Show the stack of each failed attempt, too.")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Shows all details of jobs, including the history of their attempts and what these have logged.

    Finds jobs in every state, also cold ones. With --key, finds the job of which an enqueue with this key would be a
    duplicate now. Exit code 4: the org has no such job.
    """
    from cli.calls import connect
    from cli.messages import job_json
    from windrow.v1 import queue_pb2

    if bool(ids) == bool(key):
        raise typer.BadParameter("give job ids, or --key and --queue, and not both", param_hint="'ID' / '--key'")
    if bool(key) != bool(queue):
        raise typer.BadParameter("--key and --queue belong together: give both", param_hint="'--key' / '--queue'")
    if key:
        with connect(address, timeout) as router:
            wanted_key = queue_pb2.FindJobRequest(org=org, queue=queue, dedup_key=key, include_payload=payload)
            found = router.call(router.queue.FindJob, wanted_key)
        if not found.HasField("job"):
            raise CommandFailed(f"no job of queue {queue!r} of org {org!r} has the key {key!r}", ExitCode.NOT_FOUND)
        if as_json:
            output.say_json([job_json(found.job, payloads=payload)])
        else:
            print_job(found.job, stacks=stack)
        return
    wanted = values.job_ids(values.words(ids or (), sys.stdin))
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
    job_id: OneId,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Prints a job's state, and each change of its state or progress, until the job has ended.

    Then prints the result. Shows the first line of the failure of a failed attempt; `windrow jobs get` shows all of it.
    Sees a change within a second, and the end at once. Exit code 1: the job is dead or cancelled; 4: the org has no
    such job.
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


@app.command()
def why(
    org: options.Org,
    job_id: OneId,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Says why a job does not run now, and when it will if that is known.

    The first cause is the most decisive one: as long as it holds, it does not help to end the other causes. Exit code
    4: the org has no such job.
    """
    from cli.calls import connect
    from cli.messages import causes_json, causes_shown, state_name, time_json, time_shown
    from windrow.v1 import admin_pb2

    (wanted,) = values.job_ids([job_id])
    with connect(address, timeout) as router:
        found = router.call(router.admin.ExplainJob, admin_pb2.ExplainJobRequest(org=org, id=wanted))
    state = state_name(found.state) if found.state else ""
    if as_json:
        output.say_json(
            [
                {
                    "id": wanted,
                    "state": state or None,
                    "queue": found.queue or None,
                    "kind": found.kind or None,
                    "shard": found.shard or None,
                    "runs_at": time_json(found, "runs_at"),
                    "causes": causes_json(found.causes),
                }
            ]
        )
        return
    output.facts(
        [
            ("job", wanted),
            ("state", state),
            ("queue", found.queue),
            ("kind", found.kind),
            ("why", causes_shown(found.causes)),
            ("runs at", time_shown(found, "runs_at")),
        ]
    )


@app.command("list")
def list_jobs(
    org: options.Org,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Only jobs of this queue.", show_default=False)] = "",
    states: States = None,
    kind: options.Kind = "",
    where: options.Where = None,
    made_after: options.MadeAfter = None,
    made_before: options.MadeBefore = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Print at most N jobs per state.")] = 50,
    payload: Annotated[bool, typer.Option("--payload", help="Include payloads (with --json).")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists the jobs of one queue or of all queues, by state, without leasing them.

    Shows the first line of a job's latest error; `windrow jobs get` and --json show all of it. Exit code 3: a shard did
    not answer; the jobs of the other shards are listed.
    """
    from cli.calls import connect
    from cli.messages import job_json

    wanted = _wanted(org, queue, kind, where, made_after, made_before)
    wanted.include_payload = payload
    found: list[job_pb2.Job] = []
    shown = 0
    more: list[str] = []
    away: set[str] = set()
    with connect(address, timeout) as router:
        for state in states or _UNFINISHED:
            for page, is_cut in _pages(router, wanted, state, limit=limit, away=away):
                shown += len(page)
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
    if not shown:
        job_changes.note_fields_among(wanted.attributes)
    if State.ALL in more:
        output.note("there are more: raise --limit")
    elif more:
        output.note(f"there are more that are {', '.join(more)}: raise --limit")
    output.refuse_away(away)


@app.command()
def count(
    org: options.Org,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Only jobs of this queue.", show_default=False)] = "",
    states: States = None,
    kind: options.Kind = "",
    where: options.Where = None,
    made_after: options.MadeAfter = None,
    made_before: options.MadeBefore = None,
    died_after: options.DiedAfter = None,
    died_before: options.DiedBefore = None,
    not_killed: options.NotKilled = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Counts the jobs that `windrow jobs list` would list without its --limit, in many short calls.

    `windrow stats` counts the jobs of each queue by state, without conditions. Exit code 3: a shard did not answer.
    """
    from cli.calls import connect_client
    from windrow import JobFilter, JobState

    wanted = states or _UNFINISHED
    found = JobFilter(
        queue=queue,
        kind=kind,
        states=() if State.ALL in wanted else [JobState(state.value) for state in wanted],
        attributes=values.attributes(where or (), option="--where"),
        created_after=made_after,
        created_before=made_before,
        died_after=died_after,
        died_before=died_before,
        not_killed=not_killed,
    )
    with connect_client(address, org, timeout) as client, output.counting_to(None, "jobs counted") as show:
        counted = client.count_jobs(found, on_progress=show)
    if as_json:
        output.say_json([{"count": counted}])
    else:
        output.say(str(counted))
    if not counted:
        job_changes.note_fields_among(found.attributes)


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
) -> Iterator[tuple[Sequence[job_pb2.Job], bool]]:
    """Yields the jobs in one state, page by page, and with each page whether the limit cut off more jobs. Adds to
    `away` the shards that did not answer."""
    from windrow.v1 import admin_pb2, job_pb2

    token, left = "", limit
    while left:
        request = admin_pb2.ListJobsRequest(page_size=min(left, _PAGE_MAX), page_token=token)
        request.MergeFrom(wanted)
        if state is not State.ALL:
            request.state = job_pb2.JobState.Value(f"JOB_STATE_{state.name}")
        response = router.call(router.admin.ListJobs, request)
        # An older router does not filter by attributes, so filter its answer here.
        jobs = [job for job in response.jobs if wanted.attributes.items() <= job.attributes.items()]
        left -= len(jobs)
        token = response.next_page_token
        away.update(response.unavailable_shards)
        yield jobs, bool(token) and not left
        if not token:
            return


def _print_jobs(jobs: Sequence[job_pb2.Job], *, queues: bool) -> None:
    from cli.messages import first_line, last_failure, state_name, time_shown

    # Add a column for the workers that have the jobs now, if there are such workers.
    workers = any(_holder(job) for job in jobs)
    columns = [
        Column(title="id"),
        *([Column(title="queue")] if queues else ()),
        Column(title="state", coloured=True),
        *([Column(title="worker")] if workers else ()),
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
            *([_holder(job)] if workers else ()),
            f"{job.attempt}/{job.max_attempts}",
            time_shown(job, "finished_at") or time_shown(job, "lease_deadline") or time_shown(job, "run_at"),
            job.kind,
            ": ".join(filter(None, (first_line(job.reason), last_failure(job)))),
        )
        for job in jobs
    ]
    output.table(columns, rows)


def _holder(job: job_pb2.Job) -> str:
    from cli.messages import state_name

    return job.worker if state_name(job.state) == State.LEASED else ""


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


job_changes.add_to(app)
