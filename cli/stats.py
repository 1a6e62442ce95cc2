"""`windrow stats`: an org's job counts by queue and state, once or repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from cli import options, output, values
from cli.exits import CommandFailed, ExitCode
from cli.output import Column

if TYPE_CHECKING:
    from windrow.v1 import admin_pb2

_LIVE = ("scheduled", "ready", "leased", "dead")
_FINISHED = ("succeeded", "cancelled")


def stats(
    org: options.Org,
    queue: Annotated[
        str | None, typer.Argument(metavar="QUEUE", help="Only this queue; default all.", show_default=False)
    ] = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="Count finished jobs too; scans them, which is slow if there are many.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    interval: Annotated[
        timedelta,
        typer.Option(
            "--interval",
            parser=values.duration,
            metavar="DURATION",
            show_default="2s",
            help="Time between two updates of --watch.",
        ),
    ] = timedelta(seconds=2),
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Counts an org's jobs by queue and state.

    Exit code 3: a shard did not answer; the counts are those of the other shards.
    """
    from cli.calls import connect
    from cli.messages import no_queues
    from windrow.v1 import admin_pb2

    request = admin_pb2.GetStatsRequest(org=org, queue=queue or "", include_finished=finished)
    with connect(address, timeout) as router:

        def look() -> admin_pb2.GetStatsResponse:
            return router.call(router.admin.GetStats, request)

        if watch and not as_json and output.can_redraw():
            _watch(org, look, interval, finished=finished)
        while True:
            seen = look()
            if as_json:
                output.say_json([_json(org, seen, finished=finished)])
            elif seen.queues:
                counts = shown(seen.queues, finished=finished)
                output.table(columns(counts), _rows(seen.queues, counts))
            else:
                output.note(no_queues(org))
            if not watch:
                output.refuse_away(seen.unavailable_shards)
                return
            time.sleep(interval.total_seconds())


def _watch(
    org: str, look: Callable[[], admin_pb2.GetStatsResponse], interval: timedelta, *, finished: bool
) -> NoReturn:
    """Updates the counts in place on a terminal until interrupted. Retries while the router cannot be reached."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    seen, trouble = look(), ""
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            counts = shown(seen.queues, finished=finished)
            lines = output.table_lines(columns(counts), _rows(seen.queues, counts))
            if seen.unavailable_shards and not trouble:
                trouble = f"not counted, because these shards did not answer: {', '.join(seen.unavailable_shards)}"
            head = Text(f"{org}, every {values.exact(interval)}, {datetime.now(UTC):%H:%M:%SZ}", "dim")
            live.update(Group(head, *lines, Text(trouble, "red")), refresh=True)
            time.sleep(interval.total_seconds())
            trouble = ""
            try:
                seen = look()
            except CommandFailed as error:
                if error.code is not ExitCode.UNAVAILABLE:
                    raise
                trouble = str(error)


def shown(queues: Sequence[admin_pb2.QueueStats], *, finished: bool) -> Sequence[str]:
    """Returns the states to show. Shows `blocked` only if a queue has blocked jobs, because few orgs have workflows."""
    counts = (*_LIVE, *_FINISHED) if finished else _LIVE
    return ("blocked", *counts) if any(queue.blocked for queue in queues) else counts


def columns(counts: Sequence[str]) -> list[Column]:
    return [
        Column(title="queue"),
        *(Column(title=state, right=True) for state in counts),
        Column(title="oldest", right=True),
        Column(title="next due"),
    ]


def row(queue: admin_pb2.QueueStats, counts: Sequence[str]) -> list[str]:
    from cli.messages import time_shown

    return [
        f"{queue.queue} (paused)" if queue.paused else queue.queue,
        *(f"{getattr(queue, state):,}" for state in counts),
        values.rough(queue.oldest_ready_age.ToTimedelta()) if queue.HasField("oldest_ready_age") else "",
        time_shown(queue, "next_due"),
    ]


def _rows(queues: Sequence[admin_pb2.QueueStats], counts: Sequence[str]) -> list[list[str]]:
    rows = [row(queue, counts) for queue in queues]
    if len(queues) > 1:
        totals = (f"{sum(getattr(queue, state) for queue in queues):,}" for state in counts)
        rows.append(["total", *totals, "", ""])
    return rows


def _json(org: str, seen: admin_pb2.GetStatsResponse, *, finished: bool) -> dict[str, object]:
    return {
        "org": org,
        "queues": [as_document(queue, finished=finished) for queue in seen.queues],
        "unavailable_shards": list(seen.unavailable_shards),
    }


def as_document(queue: admin_pb2.QueueStats, *, finished: bool) -> dict[str, object]:
    from cli.messages import time_json

    counts = ("blocked", *_LIVE, *(_FINISHED if finished else ()))
    return {
        "queue": queue.queue,
        **{state: getattr(queue, state) for state in counts},
        "oldest_ready_age_s": queue.oldest_ready_age.ToTimedelta().total_seconds()
        if queue.HasField("oldest_ready_age")
        else None,
        "next_due": time_json(queue, "next_due"),
        "paused": queue.paused,
    }
