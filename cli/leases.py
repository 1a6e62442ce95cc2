"""Taking jobs by hand, and what can be done with a lease: dequeue, ack, nack, extend, release."""

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

_BATCH = 1000
# The longest that one call may wait (queue.proto), and what is left of a wait that is not worth another call.
_WAIT_S_MAX = 60.0
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


def dequeue(
    org: options.Org,
    queues: Annotated[list[str], typer.Argument(metavar="QUEUE", help="One queue or several.", show_default=False)],
    max_jobs: Annotated[int, typer.Option("--max", metavar="N", min=1, max=1000, help="At most so many.")] = 1,
    window: Window = _WINDOW_DEFAULT,
    wait: Annotated[
        timedelta,
        typer.Option(
            "--wait",
            parser=values.duration,
            metavar="DURATION",
            show_default=False,
            help="If nothing is due, wait so long for a first job.",
        ),
    ] = _NO_WAIT,
    worker: Annotated[
        str | None,
        typer.Option("--worker", metavar="NAME", show_default="this host's", help="Who takes them, for the history."),
    ] = None,
    ack: Annotated[
        bool,
        typer.Option(
            "--ack/--no-ack", help="Finish the jobs once they are printed, or leave them leased.", show_default=False
        ),
    ] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Take jobs that are due, each under a lease.

    Without --ack they stay leased for the window: end that with `windrow ack`, `nack` or `release`, naming the printed
    lease. Exit code 1: nothing is due, nor falls due within --wait.
    """
    from cli.calls import connect
    from cli.messages import bytes_json, duration, time_json, time_shown
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
                    "queue": job.queue,
                    "kind": job.kind,
                    **bytes_json("payload", job.payload),
                    "attributes": dict(job.attributes),
                    "priority": job.priority,
                    "attempt": job.attempt,
                    "max_attempts": job.max_attempts,
                    "enqueued_at": time_json(job, "enqueued_at"),
                    "run_at": time_json(job, "run_at"),
                    "lease_deadline": time_json(response, "lease_deadline"),
                }
                for job in response.jobs
            )
        else:
            for at, job in enumerate(response.jobs):
                _print_leased(job, first=at == 0)
        if not response.jobs:
            names = ", ".join(queues)
            said = f"nothing fell due in {names} within {values.exact(wait)}" if wait else f"nothing is due in {names}"
            output.note(": ".join([said, *_why(router, org, queues)]))
            raise typer.Exit(ExitCode.NO)
        if ack:
            acks = [queue_pb2.Ack(lease=job.lease) for job in response.jobs]
            answers = router.call(router.queue.Ack, queue_pb2.AckRequest(org=org, acks=acks)).answers
            _judge(answers)
            output.note(f"{len(answers)} acked")
        elif not as_json:
            until = time_shown(response, "lease_deadline")
            output.note(f"leased until {until}: end that with windrow ack, nack or release")


def _why(router: Router, org: str, queues: Sequence[str]) -> list[str]:
    """What keeps these queues from giving jobs, in one sentence; none if that is nothing, or cannot be told."""
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
                reasons.append(f"queue {queue!r} is paused, until windrow queues resume {org} {queue}")
    return ["; ".join(reasons)] if reasons else []


def _first(router: Router, request: queue_pb2.DequeueRequest, wait: timedelta) -> queue_pb2.DequeueResponse:
    """What is due; if nothing is, what is due first, or nothing when the time is over."""
    from cli.messages import duration

    until_s = time.monotonic() + wait.total_seconds()
    left_s = wait.total_seconds()
    while True:
        wait_s = min(left_s, _WAIT_S_MAX)
        if wait_s:
            request.wait.CopyFrom(duration(timedelta(seconds=wait_s)))
        response = router.call(router.queue.Dequeue, request, wait_s=wait_s)
        left_s = until_s - time.monotonic()
        if response.jobs or left_s < _WORTH_WAITING_S:
            return response
        # A router that shuts down answers early: another one waits for the rest.
        time.sleep(_WORTH_WAITING_S / 2)


def ack(
    org: options.Org,
    leases: options.Leases,
    result: Annotated[
        str,
        typer.Option("--result", metavar="TEXT", show_default=False, help="Kept with the finished jobs."),
    ] = "",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Finish jobs."""
    from windrow.v1 import queue_pb2

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        acks = [queue_pb2.Ack(lease=token, result=result.encode()) for token in tokens]
        return router.call(router.queue.Ack, queue_pb2.AckRequest(org=org, acks=acks)).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def nack(
    org: options.Org,
    leases: options.Leases,
    error: Annotated[
        str, typer.Option("--error", metavar="TEXT", show_default=False, help="Kept in the history.")
    ] = "",
    delay: Annotated[
        timedelta | None,
        typer.Option(
            "--delay",
            parser=values.duration,
            metavar="DURATION",
            show_default=False,
            help="Retry after this, instead of what the retry policy says.",
        ),
    ] = None,
    kill: Annotated[bool, typer.Option("--kill", help="Dead at once, whatever attempts are left.")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Give jobs back with an error, to be retried or set aside as dead."""
    if kill and delay is not None:
        raise typer.BadParameter("give one of --delay and --kill, not both", param_hint="'--kill'")

    from cli.messages import duration
    from windrow.v1 import queue_pb2

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        nacks = [queue_pb2.Nack(lease=token, error=error) for token in tokens]
        for one in nacks:
            if kill:
                one.kill = True
            if delay is not None:
                one.delay.CopyFrom(duration(delay))
        return router.call(router.queue.Nack, queue_pb2.NackRequest(org=org, nacks=nacks)).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def extend(
    org: options.Org,
    leases: options.Leases,
    window: Window = _WINDOW_DEFAULT,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Prolong leases.

    Each then lasts at least the window from now, and is never shortened.
    """
    from cli.messages import duration
    from windrow.v1 import queue_pb2

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        request = queue_pb2.ExtendRequest(org=org, leases=tokens, visibility_window=duration(window))
        return router.call(router.queue.Extend, request).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def release(
    org: options.Org,
    leases: options.Leases,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Give jobs back at once, without counting the attempt."""
    from windrow.v1 import queue_pb2

    def act(router: Router, tokens: Sequence[bytes]) -> Sequence[job_pb2.JobAnswer.ValueType]:
        return router.call(router.queue.Release, queue_pb2.ReleaseRequest(org=org, leases=tokens)).answers

    _settle(leases, act, as_json=as_json, address=address, timeout=timeout)


def _settle(
    leases: Sequence[str],
    act: Callable[[Router, Sequence[bytes]], Sequence[job_pb2.JobAnswer.ValueType]],
    *,
    as_json: bool,
    address: str,
    timeout: timedelta,
) -> None:
    """Does something with leases, a call's worth at a time, and prints what became of each."""
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
                output.say("\n".join(f"{lease}  {answer.replace('_', ' ')}" for lease, answer in names))
    _judge(answers)


def _judge(answers: Sequence[job_pb2.JobAnswer.ValueType]) -> None:
    """Ends the command with 1 or 4 unless every answer is OK."""
    from windrow.v1 import job_pb2

    stale = sum(answer == job_pb2.JOB_ANSWER_STALE for answer in answers)
    missing = sum(answer == job_pb2.JOB_ANSWER_NOT_FOUND for answer in answers)
    if stale:
        output.note(f"{output.counted(stale, 'lease')} had ended: nothing was changed there")
    if missing:
        output.note(f"{output.counted(missing, 'lease')} of no job of this org: nothing was changed there")
    if stale or missing:
        raise typer.Exit(ExitCode.NO if stale else ExitCode.NOT_FOUND)


def _print_leased(job: job_pb2.LeasedJob, *, first: bool) -> None:
    from cli.messages import bytes_shown

    if not first:
        output.say("")
    output.heading(job.id)
    output.facts(
        [
            ("lease", values.lease_text(job.lease)),
            ("queue", job.queue),
            ("kind", job.kind),
            ("attempt", f"{job.attempt} of {job.max_attempts}"),
            ("attributes", "\n".join(f"{key}={value}" for key, value in sorted(job.attributes.items()))),
            ("payload", bytes_shown(job.payload)),
        ],
        indent=2,
    )
