"""The options of a schedule's timing, and the conversion of their values into a message."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cli import values

if TYPE_CHECKING:
    from windrow.v1 import schedules_pb2


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


Cron: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cron",
        metavar="EXPRESSION",
        show_default=False,
        help="Minute, hour, day of month, month, day of week, as in '0 8 * * 1-5'; six fields: the second first.",
    ),
]
Every: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        "--every",
        parser=values.duration,
        metavar="DURATION",
        show_default=False,
        help="The time between two runs, counted from --start or from 1970.",
    ),
]
At: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--at", parser=values.moment, metavar="TIME", show_default=False, help="Run once, at TIME."),
]
Zone: TypeAlias = Annotated[
    str | None,
    typer.Option("--tz", metavar="ZONE", show_default="UTC", help="The time zone of --cron, such as Europe/Paris."),
]
Start: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--start", parser=values.moment, metavar="TIME", show_default="now", help="No run before TIME."),
]
End: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--end", parser=values.moment, metavar="TIME", show_default="never", help="No run at TIME or later."),
]
Jitter: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        "--jitter",
        parser=values.duration,
        metavar="DURATION",
        show_default="0s",
        help="Delay each run by up to this, differently for each schedule.",
    ),
]
OverlapPolicy: TypeAlias = Annotated[
    Overlap | None,
    typer.Option("--overlap", show_default="skip", help="What to do while the job of the run before is live."),
]
CatchUpPolicy: TypeAlias = Annotated[
    CatchUp | None,
    typer.Option("--catch-up", show_default="latest", help="Which runs to store late, after an outage."),
]
CatchUpWindow: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        "--catch-up-window",
        parser=values.duration,
        metavar="DURATION",
        show_default=False,
        help="With --catch-up window: those of the last DURATION.",
    ),
]
Note: TypeAlias = Annotated[
    str | None, typer.Option("--note", metavar="TEXT", show_default=False, help="A remark for people.")
]


def spec_of(
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
        spec.overlap = overlap_number(overlap)
    if catch_up is not None:
        spec.catch_up = schedules_pb2.CatchUpPolicy.Value(f"CATCH_UP_POLICY_{catch_up.name}")
    return spec


def overlap_number(overlap: Overlap) -> schedules_pb2.OverlapPolicy.ValueType:
    from windrow.v1 import schedules_pb2

    return schedules_pb2.OverlapPolicy.Value(f"OVERLAP_POLICY_{overlap.name}")
