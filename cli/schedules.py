"""`windrow schedules`: commands for schedules, which store jobs at instants of a calendar."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cli import options, output, schedule_options, values
from cli.input_file import opened
from cli.layout import App
from cli.output import Column
from cli.schedule_output import note_end, print_schedule, run_json, run_row, schedule_json, schedule_row

if TYPE_CHECKING:
    from windrow.v1 import schedules_pb2

app = App(help="Stores jobs at instants of a calendar.")


class Field(StrEnum):
    TIME_ZONE = "time_zone"
    START = "start"
    END = "end"
    JITTER = "jitter"
    OVERLAP = "overlap"
    CATCH_UP = "catch_up"
    NOTE = "note"


_Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.", show_default=False)]


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
    from windrow.v1 import schedules_pb2

    schedules: list[schedules_pb2.ScheduleInfo] = []
    request = schedules_pb2.ListSchedulesRequest(org=org, declared_by=declared_by)
    with connect(address, timeout) as router:
        for page in router.pages(router.schedules.ListSchedules, request):
            if as_json:
                output.say_json(schedule_json(schedule) for schedule in page.schedules)
            schedules += page.schedules
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
    output.table(columns, [schedule_row(schedule) for schedule in schedules])


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
        output.say_json([{**schedule_json(found.schedule), "runs": [run_json(run) for run in found.runs]}])
        return
    print_schedule(found.schedule)
    if found.runs:
        columns = [
            Column(title="run"),
            Column(title="why"),
            Column(title="outcome", coloured=True),
            Column(title="job"),
            Column(title="job is", coloured=True),
        ]
        output.say("")
        output.table(columns, [run_row(run) for run in found.runs])


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
    cron: schedule_options.Cron = None,
    every: schedule_options.Every = None,
    at: schedule_options.At = None,
    tz: schedule_options.Zone = None,
    start: schedule_options.Start = None,
    end: schedule_options.End = None,
    jitter: schedule_options.Jitter = None,
    overlap: schedule_options.OverlapPolicy = None,
    catch_up: schedule_options.CatchUpPolicy = None,
    catch_up_window: schedule_options.CatchUpWindow = None,
    note: schedule_options.Note = None,
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

    A schedule with no time to come is created too; standard error then says so.

    Exit code 5: the schedule exists.
    """
    if payload is not None and file is not None:
        raise typer.BadParameter("give the payload or --file, not both", param_hint="'PAYLOAD' / '--file'")
    if sum(one is not None for one in (cron, every, at)) != 1:
        raise typer.BadParameter("give exactly one of them", param_hint="'--cron' / '--every' / '--at'")
    labels = values.attributes(attribute or ())

    from cli.calls import connect
    from cli.messages import duration, retry_message
    from windrow.v1 import job_pb2, schedules_pb2

    spec = schedule_options.spec_of(cron, every, at, tz, start, end, jitter, overlap, catch_up, catch_up_window, note)
    job = job_pb2.JobTemplate(
        queue=queue,
        kind=kind,
        payload=opened(file, lambda: file.read_bytes()) if file is not None else (payload or "").encode(),
        attributes=labels,
        priority=priority or 0,
        max_attempts=max_attempts or 0,
        retry=None if retry is None else retry_message(retry),
        max_runtime=None if max_runtime is None else duration(max_runtime),
        group=group,
    )
    request = schedules_pb2.CreateScheduleRequest(org=org, name=name, spec=spec, job=job, paused=paused)
    with connect(address, timeout) as router:
        schedule = router.call(router.schedules.CreateSchedule, request).schedule
    print_schedule(schedule, as_json=as_json)
    note_end(schedule)


@app.command()
def update(
    org: options.Org,
    name: _Name,
    cron: schedule_options.Cron = None,
    every: schedule_options.Every = None,
    at: schedule_options.At = None,
    tz: schedule_options.Zone = None,
    start: schedule_options.Start = None,
    end: schedule_options.End = None,
    jitter: schedule_options.Jitter = None,
    overlap: schedule_options.OverlapPolicy = None,
    catch_up: schedule_options.CatchUpPolicy = None,
    catch_up_window: schedule_options.CatchUpWindow = None,
    note: schedule_options.Note = None,
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
    """Changes the given settings. A new timing counts from now on; the job template stays as it is."""
    if sum(one is not None for one in (cron, every, at)) > 1:
        raise typer.BadParameter("give only one of them", param_hint="'--cron' / '--every' / '--at'")
    spec = schedule_options.spec_of(cron, every, at, tz, start, end, jitter, overlap, catch_up, catch_up_window, note)
    if not spec.ListFields() and not reset:
        raise typer.BadParameter("give something to change", param_hint="'--cron' / '--every' / … / '--reset'")

    from cli.calls import connect
    from cli.messages import update_mask
    from windrow.v1 import schedules_pb2

    mask = update_mask(spec, reset or ())
    request = schedules_pb2.UpdateScheduleRequest(org=org, name=name, spec=spec, update_mask=mask)
    with connect(address, timeout) as router:
        schedule = router.call(router.schedules.UpdateSchedule, request).schedule
    print_schedule(schedule, as_json=as_json)
    note_end(schedule)


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
        print_schedule(router.call(router.schedules.PauseSchedule, request).schedule, as_json=as_json)


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
        schedule = router.call(router.schedules.ResumeSchedule, request).schedule
    print_schedule(schedule, as_json=as_json)
    note_end(schedule)


@app.command()
def delete(
    org: options.Org,
    name: _Name,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Deletes a schedule and the history of its runs. Its jobs stay."""
    from cli.calls import connect
    from windrow.v1 import schedules_pb2

    with connect(address, timeout) as router:
        router.call(router.schedules.DeleteSchedule, schedules_pb2.DeleteScheduleRequest(org=org, name=name))
    output.say_deleted(org, "schedule", name, as_json=as_json)


@app.command()
def trigger(
    org: options.Org,
    name: _Name,
    request_id: Annotated[
        str | None,
        typer.Option(
            "--request-id",
            parser=values.request_id,
            metavar="UUID",
            help="A UUIDv7, so that the command may be repeated: the same run is then stored once.",
            show_default="a new one",
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stores a run now, whatever the overlap policy and a pause say. Prints the id of its job.

    A repeated command with the same --request-id prints the same job, while its run is among the schedule's newest 20.
    """
    from cli.calls import connect
    from windrow.ids import uuid7
    from windrow.v1 import schedules_pb2

    with connect(address, timeout) as router:
        request = schedules_pb2.TriggerScheduleRequest(org=org, name=name, request_id=request_id or uuid7())
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
        schedule_options.Overlap, typer.Option("--overlap", help="What to do while the job of the run before is live.")
    ] = schedule_options.Overlap.ALLOW,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stores the runs of a range of time that has passed, at most 1,000. Leaves out runs that exist already.

    With --overlap buffer-all they run one after another, at most 100.
    """
    from cli.calls import connect
    from cli.messages import timestamp
    from windrow.v1 import schedules_pb2

    request = schedules_pb2.BackfillScheduleRequest(
        org=org, name=name, begin=timestamp(begin), end=timestamp(end), overlap=schedule_options.overlap_number(overlap)
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
    cron: schedule_options.Cron = None,
    every: schedule_options.Every = None,
    at: schedule_options.At = None,
    tz: schedule_options.Zone = None,
    start: schedule_options.Start = None,
    end: schedule_options.End = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Prints the next times of a schedule, or of a timing that no schedule has yet."""
    spec = schedule_options.spec_of(cron, every, at, tz, start, end)
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
