"""Commands on leases."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options, output, values
from cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from cli.calls import Router
    from windrow.v1 import job_pb2, queue_pb2

# The names of the functions below that are commands, in the order of `windrow --help`.
COMMANDS = ("dequeue", "ack", "nack", "extend", "release", "snooze")
_BATCH = 1000
# The longest that one call may wait (queue.proto).
_WAIT_S_MAX = 60.0
# The command makes no other call if less than this remains of the time that it may wait.
_WORTH_WAITING_S = 0.1

Window = Annotated[
    timedelta,
    typer.Option(
        "--window",
        parser=values.duration,
        metavar="DURATION",
        show_default="30s",
        help="How long the jobs stay invisible to others (100ms to 12h).",
    ),
]
_WINDOW_DEFAULT = timedelta(seconds=30)
_NO_WAIT = timedelta()
# Answers about leases whose names in the output differ from the names in the protocol.
_WORDS = {"not_found": "not found", "cancelled": "job cancelled"}
# Fields that `dequeue` shows only with --json.
_NOT_PRINTED = {"priority", "enqueued", "due"}


def dequeue(
    org: options.Org,
    queues: Annotated[list[str], typer.Argument(metavar="QUEUE", help="One queue or several.", show_default=False)],
    max_jobs: Annotated[int, typer.Option("--max", metavar="N", min=1, max=1000, help="Lease at most N jobs.")] = 1,
    window: Window = _WINDOW_DEFAULT,
    wait: Annotated[
        timedelta,
        typer.Option(
            "--wait",
            parser=values.duration,
            metavar="DURATION",
            show_default=False,
            help="If no job is due, wait this long for one.",
        ),
    ] = _NO_WAIT,
    worker: Annotated[
        str | None,
        typer.Option(
            "--worker", metavar="NAME", show_default="this host's", help="The worker's name in the attempt history."
        ),
    ] = None,
    ack: Annotated[
        bool,
        typer.Option(
            "--ack/--no-ack", help="Ack the jobs after printing them, or leave them leased.", show_default=False
        ),
    ] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Leases due jobs and prints them, by priority and then by age.

    Without --ack they stay leased for the window. To end a lease earlier, pass it to `windrow ack`, `nack`,
    `release` or `snooze`. Exit code 1: no job is due, and none falls due within --wait.
    """
    from cli.calls import connect
    from cli.messages import duration, job_json, time_json, time_shown
    from windrow.v1 import queue_pb2

    request = queue_pb2.DequeueRequest(
        org=org,
        queues=queues,
        max_jobs=max_jobs,
        visibility_window=duration(window),
        worker=f"windrow@{socket.gethostname()}"[:128] if worker is None else worker,
    )
    with connect(address, timeout) as router:
        response = _first(router, request, wait)
        if as_json:
            output.say_json(
                {
                    "id": job.id,
                    "lease": values.lease_text(job.lease),
                    **job_json(job, payloads=True),
                    "lease_deadline": time_json(response, "lease_deadline"),
                }
                for job in response.jobs
            )
        else:
            for at, job in enumerate(response.jobs):
                _print_leased(job, first=at == 0)
        if not response.jobs:
            names = ", ".join(queues)
            text = f"nothing fell due in {names} within {values.exact(wait)}" if wait else f"nothing is due in {names}"
            output.note(": ".join([text, *_reasons(router, org, queues)]))
            raise typer.Exit(ExitCode.NO)
        if ack:
            acks = [queue_pb2.Ack(lease=job.lease) for job in response.jobs]
            answers = router.call(router.queue.Ack, queue_pb2.AckRequest(org=org, acks=acks)).answers
            _judge(answers)
            output.note(f"{len(answers)} acked")
        elif not as_json:
            until = time_shown(response, "lease_deadline")
            output.note(f"leased until {until}; end the lease with windrow ack, nack or release")


def _reasons(router: Router, org: str, queues: Sequence[str]) -> list[str]:
    """Returns a list with one text: why no jobs come from the queues. For example, a queue does not exist, is paused,
    or has ready jobs that something holds. The list is empty if there is no reason, or if the router does not
    answer."""
    from windrow.v1 import admin_pb2

    reasons: list[str] = []
    for queue in queues:
        try:
            found = router.call(router.admin.GetQueue, admin_pb2.GetQueueRequest(org=org, queue=queue)).queue
        except CommandFailed as error:
            if error.code is not ExitCode.NOT_FOUND:
                return []
            reasons.append(str(error))
        else:
            if found.paused:
                reasons.append(f"queue {queue!r} is paused (resume it with windrow queues resume {org} {queue})")
            elif held := _held_by(router, org, queue):
                reasons.append(f"{held} (windrow queues why {org} {queue} says more)")
    return ["; ".join(reasons)] if reasons else []


def _held_by(router: Router, org: str, queue: str) -> str:
    """Returns a sentence that says what holds a queue's ready jobs. Empty if nothing holds them, or if the router does
    not say what."""
    from windrow.causes import read_causes
    from windrow.v1 import admin_pb2

    try:
        explained = router.call(router.admin.ExplainQueue, admin_pb2.ExplainQueueRequest(org=org, queue=queue))
    except CommandFailed:
        return ""
    causes = read_causes(explained.causes, of_queue=True)
    # Name a limit only if there are ready jobs, and a quarantine only if it has set jobs aside. A limit or a quarantine
    # for which this is not true holds no jobs.
    ready = any(cause.name == "backlog" for cause in causes)
    for cause in causes:
        match cause.name:
            case "start_limit" | "in_flight_limit" if ready:
                return str(cause)
            case "quarantine" if cause.figures["set_aside"]:
                return str(cause)
            case "shard_down" | "group_backlog":
                return str(cause)
            case _:
                pass
    return ""


def _first(router: Router, request: queue_pb2.DequeueRequest, wait: timedelta) -> queue_pb2.DequeueResponse:
    """Returns the due jobs. If there are none, returns the first jobs that become due within `wait`."""
    from cli.messages import duration

    deadline = time.monotonic() + wait.total_seconds()
    left_s = wait.total_seconds()
    while True:
        wait_s = min(left_s, _WAIT_S_MAX)
        if wait_s:
            request.wait.CopyFrom(duration(timedelta(seconds=wait_s)))
        response = router.call(router.queue.Dequeue, request, wait_s=wait_s)
        left_s = deadline - time.monotonic()
        if response.jobs or left_s < _WORTH_WAITING_S:
            return response
        # A router that shuts down answers early. Wait for the remaining time at another router.
        time.sleep(_WORTH_WAITING_S / 2)


def ack(
    org: options.Org,
    leases: options.Leases,
    result: Annotated[
        str,
        typer.Option("--result", metavar="TEXT", show_default=False, help="The result to store with the jobs."),
    ] = "",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Finishes jobs.

    Repeating an ack is safe: it answers OK again. Exit code 1: a lease had ended, and its job was not changed; 4: a
    lease belongs to no job of this org.
    \f
    ```console
    $ windrow ack acme AQU161g7HEe9kACaNAGh+EFmIHGts5YHSQ9NL/s= --result sent
    AQU161g7HEe9kACaNAGh+EFmIHGts5YHSQ9NL/s=  ok
    $ windrow ack acme AQU161g7HEe9kACaNAGh+EFmIHGts5YHSQ9NL/s=
    AQU161g7HEe9kACaNAGh+EFmIHGts5YHSQ9NL/s=  ok
    $ windrow nack acme AQU161g7HEe9kACaNAGh+EFmIHGts5YHSQ9NL/s=
    AQU161g7HEe9kACaNAGh+EFmIHGts5YHSQ9NL/s=  stale
    1 lease had ended: nothing was changed
    $ echo $?
    1
    ```

    The second ack repeats the first and changes nothing. The nack comes too late.
    """
    from windrow.v1 import queue_pb2

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        acks = [queue_pb2.Ack(lease=token, result=result.encode()) for token in tokens]
        return router.call(router.queue.Ack, queue_pb2.AckRequest(org=org, acks=acks)).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def nack(
    org: options.Org,
    leases: options.Leases,
    error: Annotated[
        str, typer.Option("--error", metavar="TEXT", show_default=False, help="The reason, for the history.")
    ] = "",
    kind: Annotated[
        str,
        typer.Option("--type", metavar="NAME", show_default=False, help="The kind of error: a class or a code."),
    ] = "",
    retry_after: Annotated[
        timedelta | None,
        typer.Option(
            "--retry-after",
            parser=values.duration,
            metavar="DURATION",
            show_default=False,
            help="Retry after this delay, instead of the retry policy's.",
        ),
    ] = None,
    permanent: Annotated[
        bool, typer.Option("--permanent", help="Make the jobs dead at once, even if they have attempts left.")
    ] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Gives jobs back as failed; they are retried, or dead after their last attempt.

    The exit codes are those of `windrow ack`.
    \f
    ```console
    $ windrow nack acme AQU161g7HEe9kACaNAGh+EFXq3MFrWbm9uuhVsI= --type SMTPError --error '550 no such mailbox'
    AQU161g7HEe9kACaNAGh+EFXq3MFrWbm9uuhVsI=  ok
    ```
    """
    if permanent and retry_after is not None:
        raise typer.BadParameter("give one of --retry-after and --permanent, not both", param_hint="'--permanent'")

    from cli.messages import duration
    from windrow.v1 import job_pb2, queue_pb2

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        nacks = [queue_pb2.Nack(lease=token) for token in tokens]
        for one in nacks:
            if error or kind or permanent:
                one.failure.CopyFrom(job_pb2.Failure(type=kind, message=error, permanent=permanent))
            if retry_after is not None:
                one.retry_after.CopyFrom(duration(retry_after))
        return router.call(router.queue.Nack, queue_pb2.NackRequest(org=org, nacks=nacks)).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def extend(
    org: options.Org,
    leases: options.Leases,
    window: Window = _WINDOW_DEFAULT,
    progress: Annotated[
        tuple[int, int] | None,
        typer.Option(
            "--progress",
            metavar="DONE TOTAL",
            show_default=False,
            help="How much is done, for `windrow jobs get`; TOTAL 0: it is not known.",
        ),
    ] = None,
    note: Annotated[
        str, typer.Option("--note", metavar="TEXT", show_default=False, help="A text beside --progress.")
    ] = "",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="TEXT", show_default=False, help="Data with which the job's next attempt continues."
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Extends leases.

    Each lease then lasts for at least the window from now. A lease is never shortened.

    The exit codes are those of `windrow ack`.
    \f
    ```console
    $ windrow extend acme AQU161g7HEe9kACaNAGh+EFXq3MFrWbm9uuhVsI= --window 5m
    AQU161g7HEe9kACaNAGh+EFXq3MFrWbm9uuhVsI=  ok
    ```

    JSON keys of the commands that end or extend leases: `lease`, `answer` (`ok`, `stale`, `cancelled` or `not_found`).
    """
    if note and progress is None:
        raise typer.BadParameter("it belongs to --progress, and none is given", param_hint="'--note'")
    from cli.messages import duration
    from windrow.v1 import job_pb2, queue_pb2

    report = queue_pb2.Extend(checkpoint=None if checkpoint is None else checkpoint.encode())
    if progress is not None:
        done, total = progress
        report.progress.CopyFrom(job_pb2.Progress(done=done, total=total, note=note))

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        extends = [queue_pb2.Extend(lease=token) for token in tokens]
        for one in extends:
            one.MergeFrom(report)
        request = queue_pb2.ExtendRequest(org=org, extends=extends, visibility_window=duration(window))
        return router.call(router.queue.Extend, request).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def release(
    org: options.Org,
    leases: options.Leases,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Gives jobs back at once, without counting the attempt.

    The exit codes are those of `windrow ack`.
    \f
    ```console
    $ windrow release acme AQU161g7HEe9kACaNAGh+EF1oXaolkTOLrkOgaw=
    AQU161g7HEe9kACaNAGh+EF1oXaolkTOLrkOgaw=  ok
    ```
    """
    from windrow.v1 import queue_pb2

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        return router.call(router.queue.Release, queue_pb2.ReleaseRequest(org=org, leases=tokens)).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def snooze(
    org: options.Org,
    leases: options.Leases,
    after: Annotated[
        timedelta,
        typer.Option(
            "--after",
            parser=values.duration,
            metavar="DURATION",
            show_default=False,
            help="The jobs are ready again after this delay.",
        ),
    ],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", show_default=False, help="Why, for the attempt history.")
    ] = "",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Gives jobs back for a while, without counting the attempt.

    The exit codes are those of `windrow ack`.
    \f
    ```console
    $ windrow snooze acme AQU161g7HEe9kACaNAGh+EFmIHGts5YHSQ9NL/s= --after 10m --reason 'the report is not ready'
    AQU161g7HEe9kACaNAGh+EFmIHGts5YHSQ9NL/s=  stale
    1 lease had ended: nothing was changed
    $ echo $?
    1
    ```

    This job was acked above. A job with a live lease would be scheduled for 10 minutes later, and `jobs get` would show
    the reason.
    """
    from cli.messages import duration
    from windrow.v1 import queue_pb2

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        snoozes = [queue_pb2.Snooze(lease=token, after=duration(after), reason=reason) for token in tokens]
        return router.call(router.queue.Snooze, queue_pb2.SnoozeRequest(org=org, snoozes=snoozes)).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def _settle(
    leases: Sequence[str],
    act: Callable[[Router, Sequence[bytes]], Sequence[job_pb2.JobAnswer.ValueType]],
    *,
    as_json: bool,
    address: str,
    timeout: timedelta,
) -> None:
    """Acts on leases in batches, with one call for each batch, and prints the answer for each lease."""
    from cli.calls import connect
    from cli.messages import ANSWERS

    tokens = values.leases(values.words(leases, sys.stdin))
    answers: list[job_pb2.JobAnswer.ValueType] = []
    with connect(address, timeout) as router:
        for at in range(0, len(tokens), _BATCH):
            batch = tokens[at : at + _BATCH]
            found = act(router, batch)
            answers += found
            names = [(values.lease_text(token), ANSWERS[one]) for token, one in zip(batch, found, strict=True)]
            if as_json:
                output.say_json({"lease": lease, "answer": answer} for lease, answer in names)
            else:
                output.say("\n".join(f"{lease}  {_WORDS.get(answer, answer)}" for lease, answer in names))
    _judge(answers)


def _judge(answers: Sequence[job_pb2.JobAnswer.ValueType]) -> None:
    """Ends the command with 1 or 4 unless every answer is OK."""
    from windrow.v1 import job_pb2

    stale = sum(answer == job_pb2.JOB_ANSWER_STALE for answer in answers)
    cancelled = sum(answer == job_pb2.JOB_ANSWER_CANCELLED for answer in answers)
    missing = sum(answer == job_pb2.JOB_ANSWER_NOT_FOUND for answer in answers)
    if stale:
        output.note(f"{output.counted(stale, 'lease')} had ended: nothing was changed")
    if cancelled:
        output.note(f"{output.counted(cancelled, 'job')} had been cancelled: nothing was changed")
    if missing:
        output.note(f"{output.counted(missing, 'lease')} matched no job of this org")
    if stale or cancelled:
        raise typer.Exit(ExitCode.NO)
    if missing:
        raise typer.Exit(ExitCode.NOT_FOUND)


def _print_leased(job: job_pb2.LeasedJob, *, first: bool) -> None:
    from cli.messages import job_facts

    if not first:
        output.say("")
    output.heading(job.id)
    output.facts([fact for fact in job_facts(job) if fact[0] not in _NOT_PRINTED], indent=2)
