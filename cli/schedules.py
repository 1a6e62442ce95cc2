"""`windrow schedules`: what stores jobs at instants of a calendar."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cli import options, output, values
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from cli.calls import Router
    from windrow.v1 import schedules_pb2

_PAGE = 1000

app = App(help="Stores jobs at instants of a calendar.")


class Overlap(StrEnum):
    ALLOW = "allow"
    SKIP = "skip"
    BUFFER_ONE = "buffer-one"
    BUFFER_ALL = "buffer-all"
    CANCEL_RUNNING = "cancel-running"


class CatchUp(StrEnum):
    LATEST = "latest"
    WINDOW = "window"
    ALL = "all"


class Field(StrEnum):
    TIME_ZONE = "time_zone"
    START = "start"
    END = "end"
    JITTER = "jitter"
    OVERLAP = "overlap"
    CATCH_UP = "catch_up"
    NOTE = "note"


_Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.", show_default=False)]
_Cron: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cron",
        metavar="EXPRESSION",
        show_default=False,
        help="Minute, hour, day of month, month, day of week, as in '0 8 * * 1-5'; six fields: the second first.",
    ),
]
_Every: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        "--every",
        parser=values.duration,
        metavar="DURATION",
        show_default=False,
        help="The time between two runs, counted from --start or from 1970.",
    ),
]
_At: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--at", parser=values.moment, metavar="TIME", show_default=False, help="Run once, at TIME."),
]
_Zone: TypeAlias = Annotated[
    str | None,
    typer.Option("--tz", metavar="ZONE", show_default="UTC", help="The time zone of --cron, such as Europe/Paris."),
]
_Start: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--start", parser=values.moment, metavar="TIME", show_default="now", help="No run before TIME."),
]
_End: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--end", parser=values.moment, metavar="TIME", show_default="never", help="No run at TIME or later."),
]
_Jitter: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        "--jitter",
        parser=values.duration,
        metavar="DURATION",
        show_default="0s",
        help="Delay each run by up to this, differently for each schedule.",
    ),
]
_Overlap: TypeAlias = Annotated[
    Overlap | None,
    typer.Option("--overlap", show_default="skip", help="What to do while the job of the run before is live."),
]
_CatchUp: TypeAlias = Annotated[
    CatchUp | None,
    typer.Option("--catch-up", show_default="latest", help="Which runs to store late, after an outage."),
]
_Window: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        "--catch-up-window",
        parser=values.duration,
        metavar="DURATION",
        show_default=False,
        help="With --catch-up window: those of the last DURATION.",
    ),
]
_Note: TypeAlias = Annotated[
    str | None, typer.Option("--note", metavar="TEXT", show_default=False, help="A remark for people.")
]


@app.command("list")
def list_schedules(
    org: options.Org,
    declared_by: Annotated[
        str,
        typer.Option(
            "--declared-by", metavar="TEXT", show_default=False, help="Only those that this program declares in code."
        ),
    ] = "",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists an org's schedules by name."""
    from cli.calls import connect

    schedules: list[schedules_pb2.ScheduleInfo] = []
    with connect(address, timeout) as router:
        for page in _pages(router, org, declared_by):
            if as_json:
                output.say_json(_json(schedule) for schedule in page)
            schedules += page
    if as_json:
        return
    if not schedules:
        output.note(f"org {org!r} has no such schedules")
        return
    columns = [
        Column(title="schedule"),
        Column(title="state", coloured=True),
        Column(title="fires"),
        Column(title="next"),
        Column(title="last"),
        Column(title="queue"),
        Column(title="kind"),
    ]
    output.table(columns, [_row(schedule) for schedule in schedules])


def _pages(router: Router, org: str, declared_by: str) -> Iterator[list[schedules_pb2.ScheduleInfo]]:
    from windrow.v1 import schedules_pb2

    token = ""
    while True:
        request = schedules_pb2.ListSchedulesRequest(
            org=org, page_size=_PAGE, page_token=token, declared_by=declared_by
        )
        response = router.call(router.schedules.ListSchedules, request)
        yield list(response.schedules)
        token = response.next_page_token
        if not token:
            return


@app.command()
def show(
    org: options.Org,
    name: _Name,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Shows a schedule, its next times, and its newest runs with what became of them."""
    from cli.calls import connect
    from windrow.v1 import schedules_pb2

    with connect(address, timeout) as router:
        request = schedules_pb2.GetScheduleRequest(org=org, name=name)
        found = router.call(router.schedules.GetSchedule, request)
    if as_json:
        output.say_json([{**_json(found.schedule), "runs": [_run_json(run) for run in found.runs]}])
        return
    _print(found.schedule)
    if found.runs:
        columns = [
            Column(title="run"),
            Column(title="why"),
            Column(title="outcome", coloured=True),
            Column(title="job"),
            Column(title="job is", coloured=True),
        ]
        output.say("")
        output.table(columns, [_run_row(run) for run in found.runs])


@app.command()
def create(
    org: options.Org,
    name: _Name,
    queue: options.Queue,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Which handler runs the jobs.", show_default=False)],
    payload: Annotated[
        str | None, typer.Argument(metavar="PAYLOAD", help="The payload of each job.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", show_default=False, help="Read the payload from a file."),
    ] = None,
    cron: _Cron = None,
    every: _Every = None,
    at: _At = None,
    tz: _Zone = None,
    start: _Start = None,
    end: _End = None,
    jitter: _Jitter = None,
    overlap: _Overlap = None,
    catch_up: _CatchUp = None,
    catch_up_window: _Window = None,
    note: _Note = None,
    paused: Annotated[bool, typer.Option("--paused", help="Create it paused.")] = False,
    priority: options.Priority = 5,
    attribute: options.Attributes = None,
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
    retry: options.Retry = None,
    group: options.Group = "",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Creates a schedule. Give one of --cron, --every and --at.

    Exit code 5: the schedule exists.
    """
    if payload is not None and file is not None:
        raise typer.BadParameter("give the payload or --file, not both", param_hint="'PAYLOAD' / '--file'")
    if sum(timing is not None for timing in (cron, every, at)) != 1:
        raise typer.BadParameter("give exactly one of them", param_hint="'--cron' / '--every' / '--at'")
    labels = values.attributes(attribute or ())

    from cli.calls import connect
    from cli.messages import duration, retry_message
    from windrow.v1 import job_pb2, schedules_pb2

    spec = _spec(cron, every, at, tz, start, end, jitter, overlap, catch_up, catch_up_window, note)
    job = job_pb2.JobTemplate(
        queue=queue,
        kind=kind,
        payload=file.read_bytes() if file is not None else (payload or "").encode(),
        attributes=labels,
        priority=priority or 0,
        max_attempts=max_attempts or 0,
        retry=None if retry is None else retry_message(retry),
        max_runtime=None if max_runtime is None else duration(max_runtime),
        group=group,
    )
    request = schedules_pb2.CreateScheduleRequest(org=org, name=name, spec=spec, job=job, paused=paused)
    with connect(address, timeout) as router:
        _print(router.call(router.schedules.CreateSchedule, request).schedule, as_json=as_json)


@app.command()
def update(
    org: options.Org,
    name: _Name,
    cron: _Cron = None,
    every: _Every = None,
    at: _At = None,
    tz: _Zone = None,
    start: _Start = None,
    end: _End = None,
    jitter: _Jitter = None,
    overlap: _Overlap = None,
    catch_up: _CatchUp = None,
    catch_up_window: _Window = None,
    note: _Note = None,
    reset: Annotated[
        list[Field] | None,
        typer.Option(
            "--reset",
            metavar="FIELD",
            show_default=False,
            help="Reset to the default: time_zone, start, end, jitter, overlap, catch_up or note; may be repeated.",
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Changes what is given. A new timing counts from now on; what the jobs are like stays as it is."""
    if sum(timing is not None for timing in (cron, every, at)) > 1:
        raise typer.BadParameter("give only one of them", param_hint="'--cron' / '--every' / '--at'")
    spec = _spec(cron, every, at, tz, start, end, jitter, overlap, catch_up, catch_up_window, note)
    given = [field.name for field, _ in spec.ListFields()]
    if not given and not reset:
        raise typer.BadParameter("give something to change", param_hint="'--cron' / '--every' / … / '--reset'")
    for field in reset or ():
        if field in given:
            raise typer.BadParameter(f"{field} is given a value and reset too", param_hint="'--reset'")

    from google.protobuf.field_mask_pb2 import FieldMask

    from cli.calls import connect
    from windrow.v1 import schedules_pb2

    # A field of the mask that the spec does not have is reset.
    mask = FieldMask(paths=[*given, *(reset or ())])
    request = schedules_pb2.UpdateScheduleRequest(org=org, name=name, spec=spec, update_mask=mask)
    with connect(address, timeout) as router:
        _print(router.call(router.schedules.UpdateSchedule, request).schedule, as_json=as_json)


@app.command()
def pause(
    org: options.Org,
    name: _Name,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stops a schedule from storing jobs by itself."""
    from cli.calls import connect
    from windrow.v1 import schedules_pb2

    with connect(address, timeout) as router:
        request = schedules_pb2.PauseScheduleRequest(org=org, name=name)
        _print(router.call(router.schedules.PauseSchedule, request).schedule, as_json=as_json)


@app.command()
def resume(
    org: options.Org,
    name: _Name,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Ends a pause. The runs of the pause are skipped; `schedules backfill` can store them."""
    from cli.calls import connect
    from windrow.v1 import schedules_pb2

    with connect(address, timeout) as router:
        request = schedules_pb2.ResumeScheduleRequest(org=org, name=name)
        _print(router.call(router.schedules.ResumeSchedule, request).schedule, as_json=as_json)


@app.command()
def delete(
    org: options.Org,
    name: _Name,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Deletes a schedule and what is known of its runs. Its jobs stay."""
    from cli.calls import connect
    from windrow.v1 import schedules_pb2

    with connect(address, timeout) as router:
        router.call(router.schedules.DeleteSchedule, schedules_pb2.DeleteScheduleRequest(org=org, name=name))
    if as_json:
        output.say_json([{"org": org, "schedule": name, "deleted": True}])
    else:
        output.say(f"schedule {name} is deleted")


@app.command()
def trigger(
    org: options.Org,
    name: _Name,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stores a run now, whatever the overlap policy and a pause say. Prints the id of its job."""
    from cli.calls import connect
    from windrow.ids import uuid7
    from windrow.v1 import schedules_pb2

    with connect(address, timeout) as router:
        request = schedules_pb2.TriggerScheduleRequest(org=org, name=name, request_id=uuid7())
        job_id = router.call(router.schedules.TriggerSchedule, request).job_id
    if as_json:
        output.say_json([{"org": org, "schedule": name, "id": job_id}])
    else:
        output.say(job_id)


@app.command()
def backfill(
    org: options.Org,
    name: _Name,
    begin: Annotated[
        datetime,
        typer.Option(
            "--begin", parser=values.past_moment, metavar="TIME", show_default=False, help="The first possible run."
        ),
    ],
    end: Annotated[
        datetime,
        typer.Option(
            "--end", parser=values.past_moment, metavar="TIME", show_default=False, help="No run at TIME or later."
        ),
    ],
    overlap: Annotated[
        Overlap, typer.Option("--overlap", help="What to do while the job of the run before is live.")
    ] = Overlap.ALLOW,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stores the runs of a range of time that has passed, except those that are known: at most 1,000.

    With --overlap buffer-all they run one after another, at most 100.
    """
    from cli.calls import connect
    from cli.messages import timestamp
    from windrow.v1 import schedules_pb2

    request = schedules_pb2.BackfillScheduleRequest(
        org=org, name=name, begin=timestamp(begin), end=timestamp(end), overlap=_overlap_number(overlap)
    )
    with connect(address, timeout) as router:
        done = router.call(router.schedules.BackfillSchedule, request)
    counts = {"stored": done.stored, "buffered": done.buffered, "skipped": done.skipped, "known": done.known}
    if as_json:
        output.say_json([{"org": org, "schedule": name, **counts}])
    else:
        output.facts([("schedule", name), *((outcome, f"{count:,}") for outcome, count in counts.items())])


@app.command()
def preview(
    org: options.Org,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A schedule; or give a timing instead.", show_default=False),
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, max=100, help="How many times.")] = 10,
    after: Annotated[
        datetime | None,
        typer.Option("--after", parser=values.moment, metavar="TIME", show_default="now", help="Only runs after TIME."),
    ] = None,
    cron: _Cron = None,
    every: _Every = None,
    at: _At = None,
    tz: _Zone = None,
    start: _Start = None,
    end: _End = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Prints the next times of a schedule, or of a timing that no schedule has yet."""
    spec = _spec(cron, every, at, tz, start, end)
    if (name is None) == (spec.WhichOneof("timing") is None):
        raise typer.BadParameter(
            "give either the name of a schedule or one of the options",
            param_hint="'NAME' / '--cron' / '--every' / '--at'",
        )
    from cli.calls import connect
    from cli.messages import timestamp
    from windrow.v1 import schedules_pb2

    request = schedules_pb2.PreviewScheduleRequest(org=org, count=count)
    if name is None:
        request.spec.CopyFrom(spec)
    else:
        request.name = name
    if after is not None:
        request.after.CopyFrom(timestamp(after))
    with connect(address, timeout) as router:
        times = router.call(router.schedules.PreviewSchedule, request).times
    if as_json:
        output.say_json({"at": time.ToJsonString()} for time in times)
    elif times:
        output.say("\n".join(output.time_text(time.ToDatetime()) for time in times))
    else:
        output.note("there is no such time")


def _spec(
    cron: str | None = None,
    every: timedelta | None = None,
    at: datetime | None = None,
    tz: str | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
    jitter: timedelta | None = None,
    overlap: Overlap | None = None,
    catch_up: CatchUp | None = None,
    catch_up_window: timedelta | None = None,
    note: str | None = None,
) -> schedules_pb2.ScheduleSpec:
    from cli.messages import duration, timestamp
    from windrow.v1 import schedules_pb2

    spec = schedules_pb2.ScheduleSpec(time_zone=tz, note=note)
    if cron is not None:
        spec.cron = cron
    for field, span in (("interval", every), ("jitter", jitter), ("catch_up_window", catch_up_window)):
        if span is not None:
            getattr(spec, field).CopyFrom(duration(span))
    for field, time in (("at", at), ("start", start), ("end", end)):
        if time is not None:
            getattr(spec, field).CopyFrom(timestamp(time))
    if overlap is not None:
        spec.overlap = _overlap_number(overlap)
    if catch_up is not None:
        spec.catch_up = schedules_pb2.CatchUpPolicy.Value(f"CATCH_UP_POLICY_{catch_up.name}")
    return spec


def _overlap_number(overlap: Overlap) -> schedules_pb2.OverlapPolicy.ValueType:
    from windrow.v1 import schedules_pb2

    return schedules_pb2.OverlapPolicy.Value(f"OVERLAP_POLICY_{overlap.name}")


def _print(schedule: schedules_pb2.ScheduleInfo, *, as_json: bool = False) -> None:
    if as_json:
        output.say_json([_json(schedule)])
        return
    from cli.messages import bytes_shown, retry_policy, time_shown
    from windrow.v1 import schedules_pb2

    spec, job = schedule.spec, schedule.job
    catch_up = schedules_pb2.CatchUpPolicy.Name(spec.catch_up).removeprefix("CATCH_UP_POLICY_").lower()
    if spec.HasField("catch_up_window"):
        catch_up += f" of {values.exact(spec.catch_up_window.ToTimedelta())}"
    output.facts(
        [
            ("schedule", schedule.name),
            ("org", schedule.org),
            ("state", _state(schedule)),
            ("fires", _fires(spec)),
            ("start", time_shown(spec, "start")),
            ("end", time_shown(spec, "end")),
            ("jitter", values.exact(spec.jitter.ToTimedelta()) if spec.jitter.ToTimedelta() else ""),
            ("overlap", _word(schedules_pb2.OverlapPolicy.Name(spec.overlap), "OVERLAP_POLICY_")),
            ("catch up", catch_up),
            ("next", "\n".join(output.time_text(time.ToDatetime()) for time in schedule.next)),
            ("last", time_shown(schedule, "last")),
            ("buffered", str(schedule.buffered) if schedule.buffered else ""),
            ("note", spec.note),
            ("declared by", spec.declared_by),
            ("queue", job.queue),
            ("kind", job.kind),
            ("priority", str(job.priority)),
            ("max attempts", str(job.max_attempts or "")),
            ("max runtime", values.exact(job.max_runtime.ToTimedelta()) if job.HasField("max_runtime") else ""),
            ("retry", values.retry_text(retry_policy(job.retry)) if job.HasField("retry") else ""),
            ("group", job.group),
            ("attributes", "\n".join(f"{key}={value}" for key, value in sorted(job.attributes.items()))),
            ("payload", bytes_shown(job.payload)),
            ("created", time_shown(schedule, "created_at")),
            ("shard", schedule.shard),
        ]
    )


def _state(schedule: schedules_pb2.ScheduleInfo) -> str:
    return "paused" if schedule.paused else "open" if schedule.next else "ended"


def _fires(spec: schedules_pb2.ScheduleSpec) -> str:
    match spec.WhichOneof("timing"):
        case "cron":
            return f"{spec.cron} {spec.time_zone}"
        case "interval":
            return f"every {values.exact(spec.interval.ToTimedelta())}"
        case _:
            return f"once, {output.time_text(spec.at.ToDatetime())}"


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", "-")


def _row(schedule: schedules_pb2.ScheduleInfo) -> tuple[str, ...]:
    from cli.messages import time_shown

    upcoming = output.time_text(schedule.next[0].ToDatetime()) if schedule.next else ""
    job = schedule.job
    return (
        *(schedule.name, _state(schedule), _fires(schedule.spec), upcoming, time_shown(schedule, "last")),
        *(job.queue, job.kind),
    )


def _run_row(run: schedules_pb2.ScheduleRun) -> tuple[str, ...]:
    from cli.messages import state_name
    from windrow.v1 import job_pb2, schedules_pb2

    when = output.time_text(run.at.ToDatetime())
    if run.HasField("through"):
        when += f" … {output.time_text(run.through.ToDatetime())}"
    outcome = _word(schedules_pb2.RunOutcome.Name(run.outcome), "RUN_OUTCOME_")
    if run.skip_reason:
        outcome += f": {_word(schedules_pb2.SkipReason.Name(run.skip_reason), 'SKIP_REASON_')}"
    state = state_name(run.job_state) if run.HasField("job_state") else ""
    return when, _word(job_pb2.RunCause.Name(run.cause), "RUN_CAUSE_"), outcome, run.job_id, state


def _json(schedule: schedules_pb2.ScheduleInfo) -> dict[str, object]:
    from cli.messages import bytes_json, retry_json, time_json
    from windrow.v1 import schedules_pb2

    spec, job = schedule.spec, schedule.job
    window = spec.catch_up_window.ToTimedelta().total_seconds() if spec.HasField("catch_up_window") else None
    return {
        "org": schedule.org,
        "schedule": schedule.name,
        "paused": schedule.paused,
        "paused_at": time_json(schedule, "paused_at"),
        "cron": spec.cron or None,
        "interval_s": spec.interval.ToTimedelta().total_seconds() if spec.HasField("interval") else None,
        "at": time_json(spec, "at"),
        "time_zone": spec.time_zone,
        "start": time_json(spec, "start"),
        "end": time_json(spec, "end"),
        "jitter_s": spec.jitter.ToTimedelta().total_seconds(),
        "overlap": schedules_pb2.OverlapPolicy.Name(spec.overlap).removeprefix("OVERLAP_POLICY_").lower(),
        "catch_up": schedules_pb2.CatchUpPolicy.Name(spec.catch_up).removeprefix("CATCH_UP_POLICY_").lower(),
        "catch_up_window_s": window,
        "note": spec.note or None,
        "declared_by": spec.declared_by or None,
        "next": [time.ToJsonString() for time in schedule.next],
        "last": time_json(schedule, "last"),
        "buffered": schedule.buffered,
        "queue": job.queue,
        "kind": job.kind,
        "priority": job.priority,
        "max_attempts": job.max_attempts or None,
        "max_runtime_s": job.max_runtime.ToTimedelta().total_seconds() if job.HasField("max_runtime") else None,
        "retry": retry_json(job.retry) if job.HasField("retry") else None,
        "group": job.group or None,
        "attributes": dict(job.attributes),
        **bytes_json("payload", job.payload),
        "created_at": time_json(schedule, "created_at"),
        "shard": schedule.shard,
    }


def _run_json(run: schedules_pb2.ScheduleRun) -> dict[str, object]:
    from cli.messages import state_name, time_json
    from windrow.v1 import job_pb2, schedules_pb2

    skipped = schedules_pb2.SkipReason.Name(run.skip_reason).removeprefix("SKIP_REASON_").lower()
    return {
        "at": time_json(run, "at"),
        "through": time_json(run, "through"),
        "cause": job_pb2.RunCause.Name(run.cause).removeprefix("RUN_CAUSE_").lower(),
        "outcome": schedules_pb2.RunOutcome.Name(run.outcome).removeprefix("RUN_OUTCOME_").lower(),
        "skip_reason": skipped if run.skip_reason else None,
        "id": run.job_id or None,
        "state": state_name(run.job_state) if run.HasField("job_state") else None,
        "decided_at": time_json(run, "decided_at"),
    }
