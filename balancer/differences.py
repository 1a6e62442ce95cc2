"""Lists how a shard that lost history differs from its state before the loss, as far as the databases show. Run the
comparison before the loss is accepted. The comparison changes nothing but the shard's schema, which it migrates if the
backup comes from an older release.

Some differences are certain, because the catalog knows where orgs live now, other shards know some of the jobs, and the
audit log has recorded changes. Only clients know which jobs the shard has stored since the point of recovery, and which
jobs have ended on it since then. So this module lists all jobs that may run again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from balancer.recovery import ExaminedDatabases, Loss, known_elsewhere, slots_behind
from shard.admin import audit, restored
from shard.admin.audit import Entry
from shard.admin.restored import RestoredJob, RestoredQuarantine, RestoredQueue, RestoredWorkflow
from shard.placement import catalog, move_steps
from shard.placement.catalog import Catalog
from shard.postgres import schema
from shard.postgres.pool import Database
from shard.queue_settings import QueueSettings
from shard.schedules import lost_runs
from shard.schedules.lost_runs import Lost
from shard.vocabulary import JobId, Micros, OrgId, QueueName, ShardName, Slot

_T = TypeVar("_T")

# The audit log is read from _MARGIN_US before the point of recovery on, because the clocks of the catalog and of the
# shard may differ, and because a change is recorded before it is made.
_MARGIN_US = 60_000_000
_ENTRIES_MAX = 100_000
_SLOTS_AT_ONCE = 1000
# Methods whose changes are stored in the catalog or concern the whole cluster. The shard cannot have lost these
# changes.
_NOT_LOST = ("windrow.v1.Cluster/", "windrow shards ", "windrow keys ")
_POLICIES = frozenset({"windrow orgs keep", "windrow orgs hold", "windrow orgs release"})
_NO_SETTINGS = (QueueSettings(), QueueSettings(paused=False))


class Fate(StrEnum):
    """What happens to a job that a restored shard has."""

    # Another shard knows the job: `accept` or `recover` deletes the copy on the restored shard.
    DELETED = "deleted"
    # No other shard knows the job, and its org lives on another shard: `recover` moves the job there.
    MOVED = "moved"
    # The job will run, perhaps for the second time, because it may have ended after the point of recovery.
    MAY_RUN_AGAIN = "may_run_again"
    STAYS_DEAD = "stays_dead"


class FoundJob(NamedTuple):
    """An unfinished job that the restored shard has. `known_on`: another shard that knows the job, if there is one."""

    id: JobId
    org: OrgId
    queue: QueueName
    state: str
    fate: Fate
    known_on: ShardName | None


class CameOrg(NamedTuple):
    """An org that moved to the shard after the point of recovery. The jobs that moved with the org are lost, and so are
    the jobs that the org has enqueued on the shard since then."""

    org: OrgId
    slot: Slot
    came_from: ShardName


class Differences:
    """Made by `find`. All methods raise ShardUnavailable and Misconfigured. The cause may also be another shard that
    the method needs."""

    def __init__(
        self,
        loss: Loss,
        shard: Database,
        shards: Mapping[ShardName, Database],
        catalog_database: Database,
        *,
        cluster: str,
        known: Catalog,
        behind: Iterable[Slot],
    ) -> None:
        self._loss = loss
        self._shard = shard
        self._databases = ExaminedDatabases(shards, catalog_database, cluster=cluster)
        self._known = known
        self._behind = frozenset(behind)

    async def jobs(self) -> AsyncIterator[list[FoundJob]]:
        """Yields all unfinished jobs that the shard has, in the order of their ids."""
        async for page in self._pages(restored.jobs):
            by_org: dict[OrgId, list[RestoredJob]] = {}
            for job in page:
                if job.org is not None:
                    by_org.setdefault(job.org, []).append(job)
            yield sorted([job for org, jobs in by_org.items() for job in await self._judge(org, jobs)])

    async def came(self) -> AsyncIterator[list[CameOrg]]:
        """Yields the orgs whose slots have come to the shard since the point of recovery. Reads the orgs on the shards
        from which the slots came."""
        placements = self._known.slots
        slots = sorted(slot for slot in self._behind if self._loss.shard in placements[slot].writes)
        by_source: dict[ShardName, list[Slot]] = {}
        for slot in slots:
            placement = placements[slot]
            for name in dict.fromkeys((*placement.sources, *(former.shard for former in placement.former))):
                if name != self._loss.shard:
                    by_source.setdefault(name, []).append(slot)
        for name, theirs in by_source.items():
            database = await self._databases.at(name)
            for at in range(0, len(theirs), _SLOTS_AT_ONCE):
                rows = await move_steps.read_queues(database, theirs[at : at + _SLOTS_AT_ONCE])
                yield [CameOrg(*one, name) for one in dict.fromkeys((row.org, row.slot) for row in rows)]

    async def schedules(self) -> AsyncIterator[list[Lost]]:
        """Yields the schedules of the orgs that live on the shard, each with the runs that `accept` would skip."""
        async for page in self._pages(lost_runs.preview):
            yield [one for one in page if self._is_written(one.org)]

    async def queues(self) -> AsyncIterator[list[RestoredQueue]]:
        """Yields the queues that have a configuration, as it was at the point of recovery."""
        async for page in self._pages(restored.queues):
            yield [one for one in page if self._is_written(one.org) and one.settings not in _NO_SETTINGS]

    async def quarantines(self) -> AsyncIterator[list[RestoredQuarantine]]:
        async for page in self._pages(restored.quarantines):
            yield [one for one in page if self._is_written(one.org)]

    async def workflows(self) -> AsyncIterator[list[RestoredWorkflow]]:
        """Yields the workflows that had not ended at the point of recovery."""
        async for page in self._pages(restored.workflows):
            yield [one for one in page if self._is_written(one.org)]

    async def changes(self) -> list[Entry]:
        """Returns the changes to this shard that the audit log has recorded, beginning one minute before the point of
        recovery. The shard may have lost these changes. Reads only the newest 100,000 entries of the log."""
        since = Micros(0 if self._loss.newest_at is None else self._loss.newest_at - _MARGIN_US)
        entries = await audit.newest(
            self._databases.catalog, org=None, principal=None, method=None, since=since, limit=_ENTRIES_MAX
        )
        return [
            entry
            for entry in reversed(entries)
            if entry.org is not None
            and self._is_written(OrgId(entry.org))
            and entry.outcome in ("OK", None)
            and not entry.method.startswith(_NOT_LOST)
            and entry.method not in _POLICIES
        ]

    def _is_written(self, org: OrgId) -> bool:
        return self._loss.shard in self._known.placement(org).writes

    async def _judge(self, org: OrgId, jobs: Sequence[RestoredJob]) -> list[FoundJob]:
        # An org that is leaving the shard counts as living elsewhere, because `accept` ends its move.
        lives_elsewhere = not self._is_written(org)
        # If the slot has not moved since the point of recovery, no other shard has its jobs, so do not look for copies.
        copies: dict[JobId, ShardName] = {}
        if lives_elsewhere or self._known.slot(org) in self._behind:
            ids = [job.id for job in jobs]
            copies = await known_elsewhere(self._loss.shard, self._databases, self._known, org, ids)
        found: list[FoundJob] = []
        for job in jobs:
            if job.id in copies:
                fate = Fate.DELETED
            elif lives_elsewhere:
                fate = Fate.MOVED
            else:
                fate = Fate.STAYS_DEAD if job.state == "dead" else Fate.MAY_RUN_AGAIN
            found.append(FoundJob(job.id, org, job.queue, job.state, fate, copies.get(job.id)))
        return found

    async def _pages(self, read: Callable[[Database, _T | None], Awaitable[list[_T]]]) -> AsyncIterator[list[_T]]:
        last: _T | None = None
        while page := await read(self._shard, last):
            yield page
            last = page[-1]


async def find(
    loss: Loss,
    shard: Database,
    shards: Mapping[ShardName, Database],
    catalog_database: Database,
    *,
    cluster: str,
) -> Differences:
    """Prepares the comparison. `shard`: the restored database, opened with `may_scan`. Raises ShardUnavailable,
    Misconfigured."""
    await schema.migrate(shard, cluster=cluster)
    known = await catalog.read(catalog_database)
    behind = await slots_behind(shard, known)
    return Differences(loss, shard, shards, catalog_database, cluster=cluster, known=known, behind=behind)
