"""Recovers a shard whose database lost history: reports what is known about the loss, accepts it, and moves the shard's
stray jobs to where their orgs live (docs/decisions/0028-a-shard-that-lost-history.md).

Every operation may be repeated, may run in several processes at once, and may stop at any point, because each operation
reads from the databases what remains to be done.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shard.admin import strays
from shard.admin.strays import ROWS_MAX, NotTaken, Strays
from shard.errors import LostHistory, Misconfigured, ShardError, ShardUnavailable
from shard.health.finding import Finding, Severity
from shard.placement import catalog, identity, marks, move_steps, pins
from shard.placement.catalog import Catalog, Move
from shard.placement.move_steps import ExportedJobs
from shard.postgres import schema
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.schedules import lost_runs
from shard.vocabulary import JobId, Micros, OrgId, ShardName, Slot

_TRIES_MAX = 100
_PAUSE_S_MAX = 0.2
_FINISHED = ("succeeded", "cancelled")
_LOST = Finding(
    severity=Severity.CRITICAL,
    about="history",
    what="the shard has lost history: it lacks a mark that the catalog has confirmed",
    why="it was restored from a backup, or is a standby that lagged when it was promoted; routers refuse it",
    fix="-- find a server that has the complete history; if there is none, see `windrow shards accept SHARD --config "
    "FILE`",
)
_CATALOG_BEHIND = Finding(
    severity=Severity.CRITICAL,
    about="catalog",
    what="the shard knows later moves than the catalog",
    why="the catalog was restored from a backup, and may say that slots live where they do not",
    fix="-- find a server that has the complete catalog",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The history that a shard lost, as far as it is known."""

    shard: ShardName
    # The mark that the catalog has confirmed and the shard lacks.
    confirmed: marks.Confirmed
    # The newest mark that the shard still has from its history before the restore, or None. Marks that are newer than
    # `confirmed` do not count: routers may have written them on the restored database before they noticed the loss.
    newest: int | None
    newest_at: Micros | None
    # How many slots have moved to the shard, and how many away from it, since the point of recovery. These numbers come
    # from the epochs that the shard knows. The jobs of the slots that have moved to the shard are lost.
    slots_come: int
    slots_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What happened to the stray jobs of one org."""

    org: OrgId
    home: ShardName
    brought: int
    # Jobs that another shard knew already. They are deleted on the shard where they were stray.
    known: int


@dataclass(slots=True, kw_only=True)
class Recovery:
    """What a run of `recover` did, and what it did not do."""

    orgs: list[Brought] = field(default_factory=list["Brought"])
    # Jobs that were not moved: jobs of orgs that are moving now, jobs with a valid lease, and jobs whose ids are so old
    # that nobody can tell whether the jobs have run.
    moving: int = 0
    leased: int = 0
    older: int = 0


async def find_loss(shard: Database, catalog_database: Database, *, cluster: str) -> Loss | None:
    """Returns the loss, or None if the shard has all history that the catalog has confirmed. Raises ShardUnavailable.
    Raises Misconfigured if the database is not that shard's."""
    try:
        await identity.examine(shard, catalog_database, cluster=cluster)
        return None
    except LostHistory:
        pass
    confirmed = await marks.confirmed(catalog_database, shard.name)
    if confirmed is None:
        return None
    newest, newest_at = await marks.last_before(shard, confirmed.at) or (None, None)
    known = await catalog.read(catalog_database)
    behind = await slots_behind(shard, known)
    # Count only slots that the shard still owned at the point of recovery: slots that had left it before may have moved
    # between other shards since then.
    owned = [slot for slot, state in behind.items() if state is not None and state.state == "owned"]
    return Loss(
        shard=shard.name,
        confirmed=confirmed,
        newest=newest,
        newest_at=newest_at,
        slots_come=sum(shard.name in known.slots[slot].writes for slot in behind),
        slots_left=sum(shard.name not in known.slots[slot].reads for slot in owned),
    )


async def slots_behind(shard: Database, known: Catalog) -> dict[Slot, move_steps.SlotState | None]:
    """Returns the slots that have moved from or to this shard since the point of recovery, even if they came back. With
    each slot, returns what the shard knows about it, or None if the shard knows nothing. Leaves out slots that the
    shard never had and does not have now."""
    states = await move_steps.read_slots(shard, [Slot(slot) for slot in range(len(known.slots))])
    return {
        Slot(slot): states.get(Slot(slot))
        for slot, placement in enumerate(known.slots)
        if (
            states[Slot(slot)].epoch < placement.epoch
            if slot in states
            # Leave out the slot of an org that was pinned where it lived: no other shard has had this slot.
            else shard.name in placement.writes and bool(placement.former or placement.sources)
        )
    }


async def check_databases(
    shards: Mapping[ShardName, Database],
    catalog_database: Database,
    *,
    cluster: str,
    named: Collection[ShardName],
    catalog_at: ShardName,
) -> dict[ShardName, list[Finding]]:
    """Returns the findings of `windrow doctor` about databases that routers refuse, about shards that lost history,
    about a catalog that lost history, and about slots on shards that are not `named` in the cluster file. `catalog_at`:
    the name that the findings use for the catalog's database. Raises ShardError if the catalog cannot be read."""
    try:
        known = (
            await catalog.look(catalog_database)
            if await catalog.is_founded(catalog_database, cluster=cluster)
            else None
        )
    except Misconfigured as error:
        return {name: [_refused(error)] for name in shards}
    found: dict[ShardName, list[Finding]] = {}
    for name, database in shards.items():
        try:
            await identity.examine(database, None if known is None else catalog_database, cluster=cluster)
            has_schema = await schema.pending(database) is not None
            if known is not None and has_schema and await catalog.newest_epoch(database) > known.catalog.epoch:
                found[name] = [_CATALOG_BEHIND]
        except LostHistory:
            found[name] = [_LOST]
        except Misconfigured as error:
            found[name] = [_refused(error)]
        except ShardError:
            # Other checks report that the shard does not answer.
            continue
    if known is not None and (gone := sorted(known.catalog.holdings().keys() - set(named))):
        found.setdefault(catalog_at, []).append(_unnamed(gone))
    return found


def _unnamed(shards: Sequence[ShardName]) -> Finding:
    return Finding(
        severity=Severity.CRITICAL,
        about="catalog",
        what=f"slots live on {', '.join(shards)}, which the cluster file does not name",
        why="the jobs of these slots cannot be reached, and no router starts with this file",
        fix="-- put it back into the cluster file; before a shard leaves the file, drain it with state = 'draining'",
    )


def _refused(error: Misconfigured) -> Finding:
    return Finding(
        severity=Severity.CRITICAL,
        about="database",
        what="routers refuse this database",
        why=str(error),
        fix='-- see docs/operations.md, "A database that is refused"',
    )


async def accept(
    loss: Loss,
    shards: Mapping[ShardName, Database],
    catalog_database: Database,
    *,
    cluster: str,
    runs_again: bool = False,
) -> list[str]:
    """Lets the shard serve again without what it lost. To do so, tells the shard which slots have left it and which
    have come to it, skips the runs of schedules that the shard may have stored before the loss, and begins a new
    history. With `runs_again`, these runs are stored instead, as after an outage. Returns sentences that say what was
    done with moves, jobs and schedules. Raises ShardUnavailable, Misconfigured. After an error, the call may be
    repeated."""
    shard = shards[loss.shard]
    await schema.migrate(shard, cluster=cluster)
    confirmed = await marks.confirmed(catalog_database, loss.shard)
    if (
        confirmed is not None
        and confirmed.mark != loss.confirmed.mark
        and not (await marks.compare(shard, confirmed.mark)).lost
    ):
        # Another operator has accepted this loss already. Moves that began since then have lost nothing.
        return []
    known = await catalog.read(catalog_database)
    org_pins = await pins.read_on(catalog_database, loss.shard)
    await _retry_until_done(shard, lambda: pins.adopt(shard, org_pins))
    # The backup has brought back jobs that had left the shard with their slots. Delete these jobs before `grant_slots`
    # tells the shard which slots it owns.
    deleted = await _delete_copies(loss.shard, shards, catalog_database, known, cluster=cluster)
    messages = [
        await _repair_move(move, loss.shard, shards, catalog_database)
        for move in await catalog.moves(catalog_database)
        if move.switched and loss.shard in (move.source, move.target)
    ]
    if deleted:
        messages.append(
            f"{deleted} job(s) were deleted on {loss.shard!r}: they had left it, and other shards know them"
        )
    known = await catalog.read(catalog_database)
    await _retry_until_done(shard, lambda: strays.fence(shard, known))
    await catalog.grant_slots(shard, known)
    if not runs_again:
        skipped = await lost_runs.skip(shard)
        if skipped.schedules:
            messages.append(
                f"{skipped.schedules} schedule(s) skip their runs until now, {skipped.buffered} of which waited: "
                f"{loss.shard!r} may have stored them before"
            )
    # Do this last: until then, routers refuse the shard.
    await marks.accept(shard, catalog_database, loss.confirmed.mark)
    return messages


async def _delete_copies(
    lost: ShardName, shards: Mapping[ShardName, Database], catalog_database: Database, known: Catalog, *, cluster: str
) -> int:
    """Deletes jobs that left the shard with their slot and that the backup has brought back.

    A slot may have left the shard since the backup and have come back, or be on its way back. The backup then holds
    jobs that left with the slot, and the shard would lease them again. Jobs that another shard knows are deleted; jobs
    that no other shard knows stay. Returns how many jobs were deleted. Raises ShardUnavailable, Misconfigured."""
    shard, databases = shards[lost], ExaminedDatabases(shards, catalog_database, cluster=cluster)
    # Leave out slots that are leaving the shard: `_repair_move` makes their jobs stray.
    read_there = [
        Slot(slot)
        for slot, placement in enumerate(known.slots)
        if lost in placement.reads and lost not in placement.sources
    ]
    states = await move_steps.read_slots(shard, read_there)
    returned = [slot for slot in read_there if (states[slot].epoch if slot in states else 0) < known.slots[slot].epoch]
    deleted = 0
    for at in range(0, len(returned), ROWS_MAX):
        for row in await move_steps.read_queues(shard, returned[at : at + ROWS_MAX]):
            if row.queue is None:
                continue
            ids = await strays.read_unfinished(shard, row.org, row.queue)
            while ids:
                copies = await known_elsewhere(lost, databases, known, row.org, ids)
                deleted += await strays.delete_copies(shard, row.org, sorted(copies))
                ids = await strays.read_unfinished(shard, row.org, row.queue, behind=ids[-1])
    return deleted


async def known_elsewhere(
    lost: ShardName, databases: ExaminedDatabases, known: Catalog, org: OrgId, ids: Sequence[JobId]
) -> dict[JobId, ShardName]:
    """Returns the jobs that another shard knows, each with the name of that shard. The other shard is one where the
    org's jobs are read now, or a former owner on which the job has finished."""
    placement = known.placement(org)
    found: dict[JobId, ShardName] = {}
    for name in dict.fromkeys((*placement.reads, *(former.shard for former in placement.former))):
        rest = [job_id for job_id in ids if job_id not in found]
        if name != lost and rest:
            database = await databases.at(name)
            there = await (strays.known if name in placement.reads else _known_as_ended)(database, org, rest)
            found |= dict.fromkeys(there, name)
    return found


async def _repair_move(
    move: Move, lost: ShardName, shards: Mapping[ShardName, Database], catalog_database: Database
) -> str:
    if lost == move.source:
        # Jobs that had left the source may be there again, and chunk numbers do not tell which jobs these are. So from
        # now on, all jobs of these slots on the source are stray.
        await move_steps.end_arrival(_at(shards, move.target), move.slots, epoch=move.epoch)
        await catalog.finish_move(catalog_database, move, move.slots)
        return f"{move} is ended: jobs that are still on {lost!r} are stray"
    source = _at(shards, move.source)
    queues = await move_steps.read_queues(source, move.slots)
    await move_steps.open_slots(shards[lost], move.slots, epoch=move.epoch, queues=queues)
    states = await move_steps.read_slots(source, move.slots)
    exported = await move_steps.read_exported(source, move.slots, epoch=move.epoch)
    exported_slots = {part.slot for part in exported}
    await strays.skip_chunks(
        shards[lost],
        {slot: state.chunk - (slot in exported_slots) for slot, state in states.items() if state.epoch == move.epoch},
        epoch=move.epoch,
    )
    return f"{move} goes on: jobs that {lost!r} had stored before are lost"


async def recover(
    name: ShardName,
    shards: Mapping[ShardName, Database],
    catalog_database: Database,
    *,
    cluster: str,
    older: bool = False,
    report: Callable[[int], None] = lambda _: None,
) -> Recovery:
    """Moves the stray jobs of a shard to where their orgs live. If the shard where the org lives, or a former owner,
    knows a job already, the stray copy is deleted instead. With `older`, also handles jobs whose ids were made more
    than 7 days ago; other shards may have forgotten that such a job has run. `report` is called with the number of jobs
    handled so far. Raises ShardUnavailable, Misconfigured. After an error, the call may be repeated."""
    databases = ExaminedDatabases(shards, catalog_database, cluster=cluster)
    shard = await databases.at(name)
    known = await catalog.read(catalog_database)
    await _retry_until_done(shard, lambda: strays.fence(shard, known))
    recovery, done = Recovery(), Counter[tuple[OrgId, ShardName, bool]]()
    for remaining in await strays.count(shard, known):
        while True:
            parts = await strays.read(shard, remaining.slot, older=older)
            if not parts and not await strays.set_aside(shard, remaining.slot):
                break
            by_org: dict[OrgId, list[Strays]] = {}
            for part in parts:
                by_org.setdefault(part.org, []).append(part)
            stayed = 0
            for org, org_parts in by_org.items():
                known = await catalog.read(catalog_database, known)
                result = await _recover_org(shard, databases, known, remaining.slot, org_parts)
                if result is None:
                    stayed += sum(len(part.ids) for part in org_parts)
                else:
                    home, brought, duplicates = result
                    done[org, home, True] += brought
                    done[org, home, False] += duplicates
                    report(sum(done.values()))
            if stayed:
                # These orgs are moving now. A later run moves the jobs to where the orgs live then.
                break
    after = await strays.count(shard, known)
    recovery.leased = sum(row.leased for row in after)
    for row in after:
        young = sum(len(part.ids) for part in await strays.read(shard, row.slot, older=False))
        recovery.moving += young + row.free + row.dead
        recovery.older += max(0, row.departing - young)
    for org, home in dict.fromkeys((org, home) for org, home, _ in done):
        recovery.orgs.append(Brought(org=org, home=home, brought=done[org, home, True], known=done[org, home, False]))
    return recovery


class ExaminedDatabases:
    """The databases of the shards. Each database is examined only before its first use, so a shard that is not needed
    may be unreachable."""

    def __init__(self, shards: Mapping[ShardName, Database], catalog_database: Database, *, cluster: str) -> None:
        self.catalog = catalog_database
        self._shards = shards
        self._cluster = cluster
        self._examined: set[ShardName] = set()

    async def at(self, name: ShardName) -> Database:
        """Returns the database of a shard. Raises Misconfigured, ShardUnavailable."""
        database = _at(self._shards, name)
        if name not in self._examined:
            await identity.examine(database, self.catalog, cluster=self._cluster)
            self._examined.add(name)
        return database


async def _recover_org(
    shard: Database, databases: ExaminedDatabases, known: Catalog, slot: Slot, parts: Sequence[Strays]
) -> tuple[ShardName, int, int] | None:
    """Moves or deletes these stray jobs of one org. Returns where the org lives, how many jobs were moved there, and
    how many were deleted because another shard knows them. Returns None if the org is moving now."""
    org = parts[0].org
    placement = known.placement(org)
    if not placement.at_rest or shard.name in placement.reads:
        return None
    home = await databases.at(placement.writes[0])
    ids = [job_id for part in parts for job_id in part.ids]
    # Former owners take no new jobs, so their answers stay true.
    known_there = set[JobId]()
    for former in placement.former:
        if former.shard not in (shard.name, home.name):
            rest = [job_id for job_id in ids if job_id not in known_there]
            known_there |= await _known_as_ended(await databases.at(former.shard), org, rest)
    queues = {part.queue for part in parts}
    own = [row for row in await move_steps.read_queues(shard, [slot]) if row.org == org and row.queue in queues]
    await move_steps.make_queues(home, [row._replace(slot=known.slot(org)) for row in own])
    brought = set[JobId]()
    try:
        for _ in range(_TRIES_MAX):
            rest = [job_id for job_id in ids if job_id not in known_there and job_id not in brought]
            known_there |= await strays.known(home, org, rest)
            rest = [job_id for job_id in rest if job_id not in known_there]
            if not rest:
                break
            brought |= await strays.bring(home, parts, rest, epoch=placement.epoch) or set()
        else:
            raise ShardUnavailable(home.name, f"stray jobs of org {org!r} kept changing on that shard; try again")
    except NotTaken:
        return None
    # Before the stray copies are deleted, mark the shard where the org lives. The mark will show if that shard loses
    # the jobs that it has just stored.
    await marks.mark(home, databases.catalog)
    if brought:
        imported = [ExportedJobs(slot=slot, chunk=0, org=part.org, queue=part.queue, jobs="") for part in parts]
        await move_steps.notify_imported(home, imported)
    return home.name, *await strays.end(shard, slot, org, brought=brought, known=known_there)


async def _known_as_ended(former: Database, org: OrgId, ids: Sequence[JobId]) -> set[JobId]:
    """Returns the jobs that a former owner knows. Leaves out jobs that are live or dead there, because they are stray
    as well."""
    found = await strays.known(former, org, ids)
    if not found:
        return found
    records = await Store(former).get(org, sorted(found), include_payload=False)
    return found - {record.id for record in records if record.state not in _FINISHED}


def _at(shards: Mapping[ShardName, Database], name: ShardName) -> Database:
    if name not in shards:
        raise Misconfigured(
            f"shard {name!r} is needed, but the cluster file does not name it, or its state allows no changes"
        )
    return shards[name]


async def _retry_until_done(shard: Database, act: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(_TRIES_MAX):
        if await act():
            return
        await asyncio.sleep(random.uniform(0, _PAUSE_S_MAX))
    raise ShardUnavailable(shard.name, "enqueues or changes of queues kept the tables locked; try again")
