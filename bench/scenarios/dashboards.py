"""Draws pictures of Grafana's dashboards (deploy/grafana) without Grafana. A real Prometheus scrapes two routers during
a load with faults, and then answers every query of every panel.

This scenario measures nothing: the load is light, and the faults are chosen so that the dashboards show something. The
report also lists the alerts that fired. Without faults no alert may fire.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import windrow
from bench.disturbance import held_snapshot
from bench.payloads import stamped
from bench.report import Event, Found, Panel, Points, Sheet
from bench.scenario import Bench, Scenario
from bench.stage import SETTINGS, Servers, Stage
from bench.system import Wrong
from cli.databases import catalog_of, read
from proof.arguments import positive
from proof.background import background
from proof.balancers import open_balancer
from proof.dashboards import filled, legend, read_dashboards
from proof.postgres import Node, until
from proof.processes import free_port
from proof.prometheus import asked, scraping
from proof.table import Table
from shard.placement import pins
from shard.vocabulary import OrgId, ShardName
from windrow import DeadlineExceeded, NewJob, Schedule, Unavailable

# The shard and the org whose dashboards are drawn. The shard is stopped for a while, and the org moves away from it.
_SHARD, _ORG, _OTHER_SHARD = "s2", "acme", "s1"
# Jobs a second, for each queue of each org.
_ORGS: Mapping[str, Mapping[str, float]] = {
    _ORG: {"orders": 30, "emails": 40, "images": 15},
    "bank": {"payments": 40, "statements": 15},
    "news": {"letters": 40},
    "maps": {"tiles": 30},
    "labs": {"samples": 20},
}
# A queue whose consumers stop for a while, and a queue whose jobs take long.
_BACKLOG, _LONG = "emails", "exports"
_SCHEDULES_S = (5, 15, 60)
_ROUTERS, _PROCESSES, _NAMED_QUEUES = 2, 2, 20
_SCRAPE_S, _POINTS, _STEP_S_MIN = 5, 200, 0.5
_TURN_S = 0.25
# Shares: how many of the jobs are delayed, how many of the jobs fail, how many of the failures are permanent, how many
# of the calls are repeated, and how many of the consumers' turns take longer than their leases.
_DELAYED, _FAILED, _DEADLY, _REPEATED, _LATE = 0.1, 0.02, 0.3, 0.03, 0.01
_WINDOW_S, _SHORT_WINDOW_S, _CALL_S, _PAUSE_S = 30.0, 2.0, 5.0, 0.5
_READY_S_MAX = 60.0
_ALERT_LABELS = frozenset({"shard", "org", "queue", "kind", "instance", "method"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    minutes: float = 12.0
    faults: bool = True

    @property
    def seconds(self) -> float:
        return self.minutes * 60


async def measure(plan: Plan, bench: Bench) -> Found:
    async with bench.stage(shards=2, routers=1) as stage, AsyncExitStack() as stack:
        targets = [f"127.0.0.1:{free_port()}" for _ in range(_ROUTERS)]
        folder = stage.file("prometheus")
        folder.mkdir()
        prometheus = stack.enter_context(scraping(folder, targets, every_ms=1000 * _SCRAPE_S))
        routers = [await _router(stage, target) for target in targets]
        up = 'count(up{job="windrow"} == 1) == ' + str(_ROUTERS)
        await until(
            lambda: (asked(prometheus, "query", query=up) or {}).get("result"),
            "Prometheus scrapes",
            within_s=_READY_S_MAX,
        )
        await stack.enter_async_context(open_balancer(stage.cluster_file.path))
        clients = [
            await stack.enter_async_context(windrow.Client(one.address, org=_ORG, timeout=_CALL_S, channels=4))
            for one in routers
        ]
        for every_s in _SCHEDULES_S:
            job = NewJob("orders", "report")
            stored = await clients[0].put_schedule(f"every-{every_s}s", Schedule(every=every_s), job)
            if stored.shard != _SHARD:
                raise Wrong(f"the org {_ORG!r} is not on {_SHARD!r}, but on {stored.shard!r}")
        began_s, began_unix = time.monotonic(), time.time()
        story = Story(plan=plan, stage=stage, routers=routers, began_s=began_s, say=bench.say)
        async with background(*_load(clients, story)):
            await story.run()
        # Let Prometheus scrape the last moments.
        await asyncio.sleep(1.5 * _SCRAPE_S)
        sheets = await asyncio.to_thread(_sheets, prometheus, plan, began_unix, story.events)
        alerts = await asyncio.to_thread(_alerts, prometheus, plan, began_unix)
    panels = [(sheet, panel) for sheet in sheets for panel in sheet.panels]
    return Found(
        scenario="dashboards",
        plan=asdict(plan),
        samples=[
            {"events": [asdict(event) for event in story.events], "alerts": [asdict(alert) for alert in alerts]},
            *(_told(*one) for one in panels),
        ],
        tables=[_table(sheets), _alerts_table(alerts)],
        plots=sheets,
    )


async def _router(stage: Stage, target: str) -> Servers:
    name = f"router-{target.rpartition(':')[2]}.toml"
    tables = f'\n[router]\nmetrics = "{target}"\nmetrics_queues = {_NAMED_QUEUES}\n'
    _, servers = await stage.routers_with(name, tables, processes=_PROCESSES)
    return servers


async def _move(stage: Stage) -> None:
    """Pins the org to the other shard, so that the balancer moves the org there."""
    async with catalog_of(read(stage.cluster_file.path)) as database:
        await pins.pin(database, OrgId(_ORG), pins.OnShard(ShardName(_OTHER_SHARD)))


# ── What happens ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class Story:
    """Causes the events of the run. Each event happens when a fixed share of the run is over."""

    plan: Plan
    stage: Stage
    routers: Sequence[Servers]
    began_s: float
    say: Callable[[str], None]
    events: list[Event] = field(default_factory=list[Event])
    # Set while the consumers of _BACKLOG work; cleared while they pause.
    working: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def share(self) -> float:
        """How much of the run is over, from 0 to 1."""
        return (time.monotonic() - self.began_s) / self.plan.seconds

    async def run(self) -> None:
        """Causes the events. A router process is killed while consumers pause. Each of the later faults ends before the
        next fault begins, even in a short run."""
        self.working.set()
        if not self.plan.faults:
            await self._at(1.0)
            return
        pause_s = await self._at(0.1)
        self.working.clear()
        kill_s = await self._at(0.22)
        os.kill(self.routers[0].pids()[0], signal.SIGKILL)
        self._tell("one of the four router processes is killed, and started again", kill_s)
        resume_s = await self._at(0.32)
        self.working.set()
        self._tell(f"the consumers of the queue {_BACKLOG!r} of the org {_ORG!r} pause", pause_s, resume_s)

        node = Node(_SHARD, settings=SETTINGS, cluster=self.stage.postgres[_SHARD])
        stop_s = await self._at(0.5)
        await asyncio.to_thread(node.kill)
        start_s = await self._at(0.535)
        await node.start()
        self._tell(f"the Postgres of the shard {_SHARD!r} is down", stop_s, start_s)

        hold_s = await self._at(0.62)
        async with held_snapshot([self.stage.dsns[_SHARD]]):
            release_s = await self._at(0.78)
        self._tell(f"a forgotten transaction holds a snapshot on the shard {_SHARD!r}", hold_s, release_s)

        move_s = await self._at(0.84)
        await _move(self.stage)
        self._tell(f"the org {_ORG!r} is moved from {_SHARD!r} to {_OTHER_SHARD!r}", move_s)
        await self._at(1.0)
        self.events.sort(key=lambda event: event.at_s)

    async def _at(self, share: float) -> float:
        """Waits until this share of the run is over. Returns the time at which that was, in seconds since the
        beginning."""
        await asyncio.sleep((share - self.share) * self.plan.seconds)
        return time.monotonic() - self.began_s

    def _tell(self, what: str, at_s: float, until_s: float | None = None) -> None:
        self.say(what)
        self.events.append(Event(what=what, at_s=at_s, until_s=until_s))


# ── Load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load(clients: Sequence[windrow.Client], story: Story) -> Iterator[Coroutine[Any, Any, None]]:
    turns = itertools.cycle(clients)
    for org, queues in _ORGS.items():
        for queue, per_s in queues.items():
            luck = random.Random(f"{org}/{queue}")
            yield _again(partial(_produce, next(turns).for_org(org), queue, per_s, luck, story))
            yield _again(partial(_consume, next(turns).for_org(org), queue, luck, story))
    for client in clients:
        yield _again(partial(_work_long, client, story))


async def _again(turn: Callable[[], Awaitable[None]]) -> None:
    """Repeats the turn until this task is cancelled. Ignores calls that fail, because the metrics show them."""
    while True:
        try:
            await turn()
        except (Unavailable, DeadlineExceeded):
            await asyncio.sleep(_PAUSE_S)


async def _produce(client: windrow.Client, queue: str, per_s: float, luck: random.Random, story: Story) -> None:
    await asyncio.sleep(_TURN_S)
    now = per_s * (1 + 0.3 * math.sin(2 * math.pi * (story.share * 4 + len(client.org + queue) / 10)))
    delays = [
        luck.uniform(5, 60) if luck.random() < _DELAYED else None for _ in range(int(now * _TURN_S + luck.random()))
    ]
    jobs = [NewJob(queue, "work", *stamped(1), delay=delay) for delay in delays]
    # Send a few calls twice, as a producer does if the answer to a call was lost.
    for _ in range(2 if luck.random() < _REPEATED else 1):
        if jobs:
            await client.enqueue_many(jobs)


async def _consume(client: windrow.Client, queue: str, luck: random.Random, story: Story) -> None:
    if queue == _BACKLOG:
        await story.working.wait()
    late = luck.random() < _LATE
    window_s = _SHORT_WINDOW_S if late else _WINDOW_S
    jobs = await client.dequeue(queue, max_jobs=40, visibility_window=window_s, wait=1.0)
    await asyncio.sleep(1.2 * window_s if late else luck.uniform(0.02, 0.1))
    failed = [job for job in jobs if luck.random() < _FAILED]
    if done := [job for job in jobs if job not in failed]:
        await client.ack(done)
    for job in failed:
        retry_s = None if luck.random() < _DEADLY else luck.uniform(1, 20)
        await client.nack(job, error="refused", permanent=retry_s is None, retry_after=retry_s)


async def _work_long(client: windrow.Client, story: Story) -> None:
    """Holds the lease of one job for a fifth of the run. The org's move waits until this lease ends."""
    await client.enqueue(_LONG, "export")
    jobs = await client.dequeue(_LONG, visibility_window=_WINDOW_S, wait=1.0)
    ends = story.share + 0.2
    while jobs and story.share < ends:
        await asyncio.sleep(_WINDOW_S / 6)
        await client.extend(jobs, visibility_window=_WINDOW_S)
    await client.ack(jobs)


# ── What Prometheus answers ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert that fired. `about`: the labels that say what the alert is about."""

    name: str
    about: str
    from_s: float
    until_s: float


def _alerts(prometheus: str, plan: Plan, began_unix: float) -> list[Alert]:
    query = 'ALERTS{alertstate="firing"}'
    over = {"start": f"{began_unix}", "end": f"{began_unix + plan.seconds}", "step": f"{_SCRAPE_S}"}
    data = asked(prometheus, "query_range", query=query, **over)
    if data is None:
        raise Wrong(f"Prometheus does not answer {query}")
    found: list[Alert] = []
    for one in data["result"]:
        labels = {name: value for name, value in one["metric"].items() if name in _ALERT_LABELS}
        times = [at - began_unix for at, _ in one["values"]]
        found.append(
            Alert(
                name=one["metric"]["alertname"],
                about=", ".join(f"{name} {value}" for name, value in sorted(labels.items())),
                from_s=times[0],
                until_s=times[-1],
            )
        )
    return sorted(found, key=lambda alert: alert.from_s)


def _sheets(prometheus: str, plan: Plan, began_unix: float, events: Sequence[Event]) -> list[Sheet]:
    step_s = max(plan.seconds / _POINTS, _STEP_S_MIN)
    # Grafana chooses $__rate_interval by this formula.
    rate_s = max(4 * _SCRAPE_S, step_s + _SCRAPE_S)
    variables = {"__rate_interval": f"{math.ceil(rate_s)}s", "shard": _SHARD, "org": _ORG}
    over = {"start": f"{began_unix}", "end": f"{began_unix + plan.seconds}", "step": f"{step_s}"}

    def ask(query: str) -> Any:
        data = asked(prometheus, "query_range", query=filled(query, variables), **over)
        if data is None:
            raise Wrong(f"Prometheus does not answer {query}")
        return data["result"]

    def panel(told: Mapping[str, Any]) -> Panel:
        series = [(target["legendFormat"], one) for target in told["targets"] for one in ask(target["expr"])]
        place = told["gridPos"]
        return Panel(
            title=told["title"],
            unit=told["fieldConfig"]["defaults"]["unit"],
            x=place["x"],
            y=place["y"],
            width=place["w"],
            height=place["h"],
            lines=lines_of(series, began_unix, step_s),
        )

    sheets: list[Sheet] = []
    for name, told in read_dashboards().items():
        chosen = [f", {one['label']} {variables[one['name']]!r}" for one in told["templating"]["list"]]
        sheets.append(
            Sheet(
                name=f"dashboard-{Path(name).stem}",
                title=told["title"] + "".join(chosen),
                panels=[panel(one) for one in told["panels"]],
                events=events,
                seconds=plan.seconds,
            )
        )
    return sheets


def lines_of(series: Sequence[tuple[str, Any]], began_unix: float, step_s: float) -> dict[str, Points]:
    """Returns the lines by their legends. A second line with the same legend gets a number."""
    lines: dict[str, Points] = {}
    for form, one in series:
        name = legend(form, one["metric"]).replace("windrow.v1.", "")
        same = sum(other == name or other.startswith(f"{name} (") for other in lines)
        lines[f"{name} ({same + 1})" if same else name] = points_of(one["values"], began_unix, step_s)
    return lines


def points_of(values: Sequence[tuple[float, str]], began_unix: float, step_s: float) -> Points:
    """Returns points over the seconds since the beginning. The line has a gap where values are missing, or are not
    finite numbers."""
    points: list[tuple[float, float]] = []
    for at, text in values:
        at_s, value = at - began_unix, float(text)
        if points and at_s - points[-1][0] > 1.5 * step_s:
            points.append((at_s - step_s, math.nan))
        points.append((at_s, value if math.isfinite(value) else math.nan))
    return points


def _told(sheet: Sheet, panel: Panel) -> dict[str, object]:
    return {
        "dashboard": sheet.name,
        "panel": panel.title,
        "unit": panel.unit,
        "lines": {
            name: [(round(at, 3), None if math.isnan(value) else value) for at, value in points]
            for name, points in panel.lines.items()
        },
    }


def _table(sheets: Sequence[Sheet]) -> Table:
    return Table(
        title="Dashboards that were drawn",
        head=("dashboard", "panels", "of these without data"),
        rows=[
            (one.title, f"{len(one.panels)}", ", ".join(each.title for each in one.panels if not each.lines) or "none")
            for one in sheets
        ],
        note="Each is a PNG file beside this one.",
    )


def _alerts_table(alerts: Sequence[Alert]) -> Table:
    return Table(
        title="Alerts that fired",
        head=("alert", "about", "from, s", "until, s"),
        rows=[(one.name, one.about, f"{one.from_s:.0f}", f"{one.until_s:.0f}") for one in alerts]
        or [("none", "", "", "")],
        note="By the rules of deploy/prometheus, in the seconds since the load began.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=positive, default=Plan().minutes, help="how long the load lasts; 12")
    parser.add_argument("--healthy", action="store_true", help="no faults")


SCENARIO = Scenario(
    help="nothing: it draws Grafana's dashboards from a real Prometheus during a load with faults",
    options=_options,
    plan=lambda given: Plan(minutes=given.minutes, faults=not given.healthy),
    measure=measure,
    full=None,
    quick=None,
)
