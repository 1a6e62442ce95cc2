"""`windrow shards differences`: shows what is known about a loss of history before it is accepted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Annotated

import typer

from cli import audit, databases, options, output, recovery
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from balancer.differences import Differences
    from balancer.recovery import Loss
    from shard.placement.cluster_file import Cluster
    from shard.queue_settings import QueueSettings
    from shard.schedules.lost_runs import Lost

_CATALOG = "not lost, because the catalog has them: limits, weights, retention of orgs, legal holds, pins, keys"


def add_to(shards: App) -> None:
    shards.command("differences")(differences)


def differences(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="The shard that lost history.", show_default=False)],
    config: options.Config,
    as_json: options.Json = False,
) -> None:
    """Lists, before a loss is accepted, how the shard that lost history differs from what it was.

    Some differences are certain, because the catalog knows where orgs live now, other shards have jobs, and the audit
    log has recorded changes. Only clients know which jobs ended or came since the point of recovery. So the command
    lists all jobs that may run again; with --json, it lists each by its id. Reads every unfinished job of the shard.
    Changes nothing, except that it brings the schema of an old backup up to date.
    """
    cluster = databases.read(config)
    if not databases.asked(_list(cluster, shard, as_json=as_json)) and not as_json:
        output.say(f"shard {shard} has lost nothing that the catalog knows of")


async def _list(cluster: Cluster, shard: str, *, as_json: bool) -> bool:
    """Prints the differences. Returns whether the shard has lost history."""
    from archiver.service import opened
    from balancer.differences import find
    from balancer.recovery import find_loss
    from balancer.shards import open_shards

    name = recovery.named(cluster, shard)
    dsn = next(entry.dsn for entry in cluster.shards if entry.name == name)
    async with open_shards(cluster) as shards, opened(name, dsn) as scanned:
        loss = await find_loss(shards.databases[name], shards.catalog, cluster=cluster.name)
        if as_json:
            output.say_json([recovery.loss_json(shard, loss)])
        if loss is None:
            return False
        found = await find(loss, scanned, shards.databases, shards.catalog, cluster=cluster.name)
        if as_json:
            async for page in _documents(found):
                output.say_json(page)
        else:
            await _print(cluster, loss, found)
        return True


# ── For programs ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _documents(found: Differences) -> AsyncIterator[Iterable[Mapping[str, object]]]:
    """Yields one object for each difference, a page at a time."""
    async for jobs in found.jobs():
        yield [{"difference": "job", **job._asdict()} for job in jobs]
    async for came in found.came():
        yield [{"difference": "org_came", **one._asdict()} for one in came]
    async for schedules in found.schedules():
        yield list(map(_schedule_json, schedules))
    async for queues in found.queues():
        yield [{"difference": "queue", "org": one.org, "queue": one.queue, **_settings(one.settings)} for one in queues]
    async for kinds in found.quarantines():
        yield [{"difference": "quarantine", "org": one.org, "queue": one.queue, "kind": one.kind} for one in kinds]
    async for workflows in found.workflows():
        yield [{"difference": "workflow", "org": one.org, "id": one.id, "name": one.name} for one in workflows]
    yield [{"difference": "change", **audit.entry_json(entry)} for entry in await found.changes()]


def _schedule_json(one: Lost) -> dict[str, object]:
    times = {"next": one.next_at, "skipped": one.first, "skipped_through": one.through}
    return {
        "difference": "schedule",
        "org": one.org,
        "schedule": one.name,
        "paused": one.paused,
        **{name: None if at is None else recovery.time_json(at) for name, at in times.items()},
        "skipped_buffered": one.buffered,
    }


def _settings(settings: QueueSettings) -> dict[str, object]:
    return {name: json.loads(str(value)) if name == "retry" else value for name, value in settings.given().items()}


def _setting_text(name: str, value: object) -> str:
    return name if value is True else f"{name} {json.dumps(value)}"


# ── For people ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _print(cluster: Cluster, loss: Loss, found: Differences) -> None:
    from shard.admin.audit import is_on

    output.say(recovery.loss_text(loss))
    await _print_jobs(loss.shard, found)
    came = [(one.org, one.came_from) async for page in found.came() for one in page]
    _section(
        "orgs that came since: their jobs, schedules, workflows and configurations of queues are gone",
        _columns("org", "came from"),
        came,
    )
    schedules = [_schedule_row(one) async for page in found.schedules() for one in page if one.first or one.buffered]
    _section(
        "schedules: these runs may have been stored since, and are skipped (or not: accept --schedules run-again)",
        _columns("org", "schedule", "first", "last", "waiting"),
        schedules,
    )
    queues = [
        (one.org, one.queue, ", ".join(starmap(_setting_text, _settings(one.settings).items())))
        async for page in found.queues()
        for one in page
    ]
    _section(
        "queues with a configuration: it is as it was then",
        _columns("org", "queue", "then"),
        queues,
    )
    kinds = [(one.org, one.queue, one.kind) async for page in found.quarantines() for one in page]
    _section(
        "kinds that are quarantined, as they were then",
        _columns("org", "queue", "kind"),
        kinds,
    )
    running = Counter([one.org async for page in found.workflows() for one in page])
    _section(
        "workflows that had not ended then: they go on from there",
        [*_columns("org"), Column(title="workflows", right=True)],
        [(org, f"{number:,}") for org, number in sorted(running.items())],
    )
    changes = [audit.entry_row(entry) for entry in await found.changes()]
    _section(
        "changes since then and in the minute before, by the audit log: make those again that the shard lacks",
        audit.COLUMNS,
        changes,
    )
    output.say("")
    if not is_on(cluster):
        output.say("changes of queues and schedules since are not known: the cluster keeps no audit log")
    output.say(_CATALOG)


async def _print_jobs(shard: str, found: Differences) -> None:
    from balancer.differences import Fate

    moved, here = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    with output.working(f"reading the jobs of {shard}"):
        async for page in found.jobs():
            for job in page:
                if job.fate in (Fate.DELETED, Fate.MOVED):
                    moved[job.org, job.queue, job.state, job.fate, job.known_on or ""] += 1
                else:
                    here[job.org, job.queue, job.state] += 1
    _section(
        "jobs of orgs that moved: a copy that another shard knows is deleted, the others move to where the org lives",
        [*_columns("org", "queue", "then", "becomes", "known on"), Column(title="jobs", right=True)],
        [(*key, f"{number:,}") for key, number in sorted(moved.items())],
    )
    _section(
        "jobs that had not ended then: those that ended since run again (dead ones stay dead); only clients know which",
        [*_columns("org", "queue", "then"), Column(title="jobs", right=True)],
        [(*key, f"{number:,}") for key, number in sorted(here.items())],
    )


def _schedule_row(one: Lost) -> tuple[str, ...]:
    first, last = ("" if at is None else recovery.time_text(at) for at in (one.first, one.through or one.first))
    return one.org, one.name, first, last, str(one.buffered or "")


def _columns(*titles: str) -> list[Column]:
    return [Column(title=title) for title in titles]


def _section(title: str, columns: Sequence[Column], rows: Sequence[tuple[str, ...]]) -> None:
    if rows:
        output.say("")
        output.say(output.wrapped(title, indent=0))
        output.table(columns, rows)
