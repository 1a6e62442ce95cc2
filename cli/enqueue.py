"""`windrow enqueue`: stores one job, or a job for each line of a file or of standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options, output, values
from cli.exits import CommandFailed, ExitCode, RequestRefused
from cli.input_file import opened, payload_of, refuse_two_payloads

if TYPE_CHECKING:
    from cli.calls import Router
    from windrow.v1 import job_pb2, queue_pb2

_BATCH_JOBS_MAX = 1000
_BATCH_BYTES_MAX = 4 * 1024 * 1024
_PAYLOAD_BYTES_MAX = 1024 * 1024


def enqueue(
    org: options.Org,
    queue: options.Queue,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Which handler runs the job.", show_default=False)],
    payload: Annotated[
        str | None,
        typer.Argument(
            metavar="PAYLOAD",
            help="The job's payload, default empty; - reads it from standard input.",
            show_default=False,
        ),
    ] = None,
    file: options.PayloadFile = None,
    lines: Annotated[
        bool,
        typer.Option("--lines", help="Store one job per line of --file or standard input; skips blank lines."),
    ] = False,
    delay: options.Delay = None,
    run_at: options.RunAt = None,
    expires_at: Annotated[
        datetime | None,
        typer.Option(
            "--expires-at",
            parser=values.moment,
            metavar="TIME",
            show_default=False,
            help="Cancel the job if it has not run by then.",
        ),
    ] = None,
    priority: options.Priority = 5,
    attribute: options.Attributes = None,
    dedup_key: Annotated[
        str,
        typer.Option(
            "--dedup-key",
            metavar="KEY",
            show_default=False,
            help="Store nothing if a job of the queue had this key within --dedup-window, or has it --while-live.",
        ),
    ] = "",
    dedup_window: Annotated[
        timedelta | None,
        typer.Option(
            "--dedup-window",
            parser=values.duration,
            metavar="DURATION",
            show_default="1d",
            help="How long --dedup-key is remembered.",
        ),
    ] = None,
    while_live: Annotated[
        bool,
        typer.Option(
            "--while-live",
            help="Remember --dedup-key until its job has succeeded, died or was cancelled, and not for a time.",
        ),
    ] = False,
    max_attempts: options.MaxAttempts = None,
    max_runtime: Annotated[
        timedelta | None,
        typer.Option(
            "--max-runtime",
            parser=values.duration,
            metavar="DURATION",
            show_default=False,
            help="How long one attempt may take: then its lease ends, however often it is extended.",
        ),
    ] = None,
    group: options.Group = "",
    retry: options.Retry = None,
    job_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            show_default=False,
            help="The job's id (UUIDv7): enqueueing it again stores nothing new.",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="ID",
            show_default=False,
            help="With --lines: make the jobs' ids from this UUIDv7, so that the same lines are stored only once.",
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stores a job, or many with --lines, and prints their ids.

    A printed id means that the job is committed. With --dedup-key, or an --id used before, it may be the id of a job
    stored earlier. --retry and --max-attempts override the queue's settings.
    """
    if delay is not None and run_at is not None:
        raise typer.BadParameter("give one of --delay and --run-at, not both", param_hint="'--run-at'")
    if lines and (dedup_key or job_id):
        raise typer.BadParameter(
            "all lines would be the same job: enqueue them one by one", param_hint="'--dedup-key' / '--id'"
        )
    if batch is not None and not lines:
        raise typer.BadParameter("it is for --lines; a single job has --id", param_hint="'--batch'")
    refuse_two_payloads(payload, file)
    if lines and payload not in (None, "-"):
        raise typer.BadParameter("with --lines the payloads come from --file or standard input", param_hint="'PAYLOAD'")
    if dedup_window is not None and not dedup_key:
        raise typer.BadParameter("it needs a --dedup-key, and none is given", param_hint="'--dedup-window'")
    if while_live and not dedup_key:
        raise typer.BadParameter("it needs a --dedup-key, and none is given", param_hint="'--while-live'")
    if while_live and dedup_window is not None:
        raise typer.BadParameter("give one of --dedup-window and --while-live, not both", param_hint="'--while-live'")
    # Do not refuse an expired job that has an --id: an earlier command may have stored the job before it expired. Only
    # the router knows that.
    if expires_at is not None and job_id is None and expires_at <= datetime.now(UTC):
        raise typer.BadParameter(
            f"{expires_at.isoformat(timespec='seconds')} has passed: the job would never run",
            param_hint="'--expires-at'",
        )
    labels = values.attributes(attribute or ())

    from cli.calls import connect
    from cli.messages import duration, retry_message, timestamp
    from windrow.v1 import job_pb2

    pattern = job_pb2.NewJob(
        template=job_pb2.JobTemplate(queue=queue, kind=kind, priority=priority or 0, attributes=labels)
    )
    if delay is not None:
        pattern.delay.CopyFrom(duration(delay))
    if run_at is not None:
        pattern.run_at.CopyFrom(timestamp(run_at))
    if expires_at is not None:
        pattern.expires_at.CopyFrom(timestamp(expires_at))
    if dedup_key:
        pattern.dedup.key = dedup_key
    if dedup_window is not None:
        pattern.dedup.window.CopyFrom(duration(dedup_window))
    if while_live:
        pattern.dedup.while_live = True
    if max_attempts is not None:
        pattern.template.max_attempts = max_attempts
    if max_runtime is not None:
        pattern.template.max_runtime.CopyFrom(duration(max_runtime))
    pattern.template.group = group
    if retry is not None:
        pattern.template.retry.CopyFrom(retry_message(retry))

    with connect(address, timeout) as router:
        if lines:
            (batch_id,) = values.job_ids([batch]) if batch else _new_ids(1)
            _enqueue_lines(router, org, pattern, _lines(file), batch_id, as_json=as_json)
        else:
            pattern.template.payload = payload_of(payload, file, bytes_max=_PAYLOAD_BYTES_MAX, into="a job")
            (pattern.id,) = values.job_ids([job_id]) if job_id else _new_ids(1)
            try:
                results = _store(router, org, [pattern], ids_given=job_id is not None)
            except CommandFailed as error:
                if error.code is not ExitCode.UNAVAILABLE:
                    raise
                hint = f"repeat the command with --id {pattern.id}: the job is then stored only once"
                raise CommandFailed(str(error), error.code, particulars=[*error.particulars, hint]) from error
            _print_ids(results, as_json=as_json)
            if results[0].duplicate and not as_json:
                output.note(f"{_known(results[0])}: nothing new was stored")


def _enqueue_lines(
    router: Router, org: str, pattern: job_pb2.NewJob, lines: Iterable[bytes], batch_id: str, *, as_json: bool
) -> None:
    stored = duplicates = 0
    hint = f"repeat the command with --batch {batch_id}: what is stored is not stored again"
    try:
        with output.counting("jobs stored") as progress:
            task = progress.add_task("", total=None, count=0) if progress else None
            for results in _stored(router, org, pattern, lines, batch_id):
                stored += len(results)
                duplicates += sum(result.duplicate for result in results)
                if progress is not None and task is not None:
                    progress.update(task, count=stored)
                _print_ids(results, as_json=as_json)
    except CommandFailed as error:
        raise CommandFailed(str(error), error.code, particulars=[*error.particulars, hint]) from error
    except KeyboardInterrupt:
        output.note(hint)
        raise
    finally:
        # Print how many jobs are stored, also after an error.
        if stored:
            before = f", {duplicates:,} of them before" if duplicates else ""
            output.note(f"{output.counted(stored, 'job')} stored{before}")


def _stored(
    router: Router, org: str, pattern: job_pb2.NewJob, lines: Iterable[bytes], batch_id: str
) -> Iterator[Sequence[queue_pb2.EnqueueResult]]:
    """Yields the results of each call. If a limit is smaller than a call, sends the lines of this call in smaller
    calls."""
    from cli.calls import TooMuch
    from windrow.ids import nth_id

    for batch in _batches(lines):
        at, size = 0, len(batch)
        while part := batch[at : at + size]:
            jobs = [_with_payload(pattern, payload) for _, payload in part]
            for job, (number, _) in zip(jobs, part, strict=True):
                job.id = nth_id(batch_id, number)
            try:
                results = _store(router, org, jobs, ids_given=False)
            except CommandFailed as error:
                if isinstance(error, TooMuch) and error.limit and (smaller := error.limit.part_of(len(part))):
                    size = smaller
                    continue
                where = f"line {part[0][0]} and those after it are not stored"
                raise CommandFailed(f"{error}; {where}", error.code, particulars=error.particulars) from error
            yield results
            at += len(part)


def _batches(lines: Iterable[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Yields batches, each for one call: the lines' numbers and payloads."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    for number, line in enumerate(lines, 1):
        payload = line.rstrip(b"\r\n")
        if not payload.strip():
            continue
        if len(payload) > _PAYLOAD_BYTES_MAX:
            if batch:
                yield batch
            raise CommandFailed(
                f"line {number} has {len(payload)} bytes, and a payload at most {_PAYLOAD_BYTES_MAX}: "
                "the jobs of that line and of those after it are not stored",
                ExitCode.USAGE,
            )
        if batch and (len(batch) == _BATCH_JOBS_MAX or size + len(payload) > _BATCH_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append((number, payload))
        size += len(payload)
    if batch:
        yield batch


def _with_payload(pattern: job_pb2.NewJob, payload: bytes) -> job_pb2.NewJob:
    job = type(pattern)()
    job.CopyFrom(pattern)
    job.template.payload = payload
    return job


def _store(
    router: Router, org: str, jobs: Sequence[job_pb2.NewJob], *, ids_given: bool
) -> Sequence[queue_pb2.EnqueueResult]:
    from windrow.v1 import queue_pb2

    try:
        return router.call(router.queue.Enqueue, queue_pb2.EnqueueRequest(org=org, jobs=jobs)).results
    except RequestRefused as error:
        faults = [description for field, description in error.violations if field.endswith("].id")]
        if ids_given or not faults:
            raise
        # This command made the ids, so the arguments of the user are not wrong.
        raise CommandFailed(
            "this machine's clock and the shard's are too far apart", ExitCode.REFUSED, particulars=faults[:1]
        ) from error


def _print_ids(results: Sequence[queue_pb2.EnqueueResult], *, as_json: bool) -> None:
    """Prints the ids of stored jobs. Raises CommandFailed if an id belongs to another job."""
    from cli.messages import state_name

    if as_json:
        output.say_json(
            {
                "id": result.id,
                "duplicate": result.duplicate,
                "state": state_name(result.state) if result.state else None,
                "differs": result.differs,
            }
            for result in results
        )
    else:
        output.say("\n".join(result.id for result in results))
    for result in results:
        if result.differs:
            raise CommandFailed(
                f"job {_known(result)}, with another queue, kind or payload: nothing was stored under this id; "
                "a new job needs an id or a batch of its own",
                ExitCode.REFUSED,
            )


def _known(result: queue_pb2.EnqueueResult) -> str:
    from cli.messages import state_name

    return f"{result.id} existed already" + (f" and is {state_name(result.state)}" if result.state else "")


def _lines(file: Path | None) -> Iterator[bytes]:
    if file is None:
        yield from sys.stdin.buffer
        return
    with opened(file, lambda: file.open("rb")) as source:
        yield from source


def _new_ids(count: int) -> list[str]:
    # Make the ids here, so that they are known even if the answer is lost.
    from windrow.ids import uuid7

    return [uuid7() for _ in range(count)]
