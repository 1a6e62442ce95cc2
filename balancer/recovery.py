"""A shard whose database has lost history: what is known of the loss, how it is accepted, and how its stray jobs are
brought to where their orgs live (docs/decisions/0028-a-shard-that-lost-history.md).

Everything may be done again, at the same time by others too, and may end anywhere: what is left to do is read from the
databases.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shard import catalog, history, identity, moving, pinning, schema, strays
from shard.catalog import Catalog, Move
from shard.database import Database
from shard.errors import LostHistory, Misconfigured, ShardError, ShardUnavailable
from shard.findings import Finding, Severity
from shard.moving import Departed
from shard.store import Store
from shard.strays import NotTaken, Strays
from shard.vocabulary import JobId, Micros, OrgId, ShardName, Slot

_TRIES_MAX = 100
_PAUSE_S_MAX = 0.2
_FINISHED = ("succeeded", "cancelled")
_LOST = Finding(
    severity=Severity.CRITICAL,
    about="history",
    what="the shard has lost history: it lacks a mark that the catalog has confirmed",
    why="it was restored from a backup, or is a standby that lagged when it was promoted; routers refuse it",
    fix="-- find a server that has all of it; else see `windrow shards accept`",
)
_CATALOG_BEHIND = Finding(
    severity=Severity.CRITICAL,
    about="catalog",
    what="the shard knows of later moves than the catalog",
    why="the catalog was restored from a backup, and may say that slots live where they do not",
    fix="-- find a server that has all of the catalog",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What is known of the history that a shard has lost."""

    shard: ShardName
    # The mark that the catalog has confirmed and the shard lacks.
    confirmed: history.Confirmed
    # The newest mark that the shard has; None: it has none.
    newest: int | None
    newest_at: Micros | None
    # How many slots have come to the shard since, with jobs that are lost, and have left it since, by what it knows.
    slots_come: int
    slots_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What became of an org's stray jobs."""

    org: OrgId
    home: ShardName
    brought: int
    # Were known to another shard already, and are cancelled on the stray one.
    known: int


@dataclass(slots=True, kw_only=True)
class Recovery:
    """What a run of `recover` has done, and what it left."""

    orgs: list[Brought] = field(default_factory=list["Brought"])
    # Jobs of orgs that move just now, jobs under a lease, and jobs whose ids are too old to tell whether they have run.
    moving: int = 0
    leased: int = 0
    older: int = 0


async def find_loss(shard: Database, catalog_database: Database, *, cluster: str) -> Loss | None:
    """None: the shard has all that the catalog has confirmed. Raises Misconfigured if the database is not that shard's,
    ShardUnavailable."""
    try:
        await identity.examine(shard, catalog_database, cluster=cluster)
        return None
    except LostHistory:
        pass
    confirmed = await history.confirmed(catalog_database, shard.name)
    if confirmed is None:
        return None
    comparison = await history.compare(shard, confirmed.mark)
    known = await catalog.read(catalog_database)
    states = await moving.read_slots(shard, [Slot(slot) for slot in range(len(known.slots))])
    behind = [slot for slot, state in states.items() if state.epoch < known.slots[slot].epoch]
    return Loss(
        shard=shard.name,
        confirmed=confirmed,
        newest=comparison.newest,
        newest_at=comparison.newest_at,
        slots_come=sum(shard.name in known.slots[slot].writes for slot in behind),
        slots_left=sum(shard.name not in known.slots[slot].reads for slot in behind),
    )


async def compare_histories(
    shards: Mapping[ShardName, Database], catalog_database: Database, *, cluster: str
) -> dict[ShardName, list[Finding]]:
    """What `windrow doctor` says of shards that lost history, and of a catalog that did. Raises ShardError where the
    catalog cannot be asked."""
    if not await catalog.is_founded(catalog_database, cluster=cluster):
        return {}
    known, marks = await catalog.look(catalog_database)
    found: dict[ShardName, list[Finding]] = {}
    for name, database in shards.items():
        try:
            mark = marks.get(name)
            if mark is not None and (await history.compare(database, mark)).lost:
                found[name] = [_LOST]
            elif await catalog.newest_epoch(database) > known.epoch:
                found[name] = [_CATALOG_BEHIND]
        except ShardError:
            # That it does not answer is said elsewhere.
            continue
    return found


async def accept(
    loss: Loss, shards: Mapping[ShardName, Database], catalog_database: Database, *, cluster: str
) -> list[str]:
    """Has the shard serve again, without what it has lost: it is told which slots have left it and which have come, and
    begins a new history. Answers what was done about moves. Raises ShardUnavailable, Misconfigured; then it may be
    called again."""
    shard = shards[loss.shard]
    await schema.migrate(shard, cluster=cluster)
    said = [
        await _mend(move, loss.shard, shards, catalog_database)
        for move in await catalog.moves(catalog_database)
        if move.switched and loss.shard in (move.source, move.target)
    ]
    known = await catalog.read(catalog_database)
    await _insist(shard, lambda: strays.fence(shard, known))
    pins = await pinning.read_on(catalog_database, loss.shard)
    await _insist(shard, lambda: pinning.settle(shard, pins))
    await catalog.grant(shard, known)
    # Last: until then the shard is refused.
    await history.accept(shard, catalog_database, loss.confirmed.mark)
    return said


async def _mend(move: Move, lost: ShardName, shards: Mapping[ShardName, Database], catalog_database: Database) -> str:
    if lost == move.source:
        # What had left it may be there again, and chunks do not tell which: its jobs are stray ones from now on.
        await catalog.leave(catalog_database, move, move.slots)
        return f"{move} is ended: jobs that are still on {lost!r} are stray"
    source = _at(shards, move.source)
    queues = await moving.read_queues(source, move.slots)
    await moving.open_slots(shards[lost], move.slots, epoch=move.epoch, queues=queues)
    there = await moving.read_slots(source, move.slots)
    departed = await moving.read_departing(source, move.slots, epoch=move.epoch)
    on_the_way = {part.slot for part in departed}
    await strays.skip_chunks(
        shards[lost],
        {slot: state.chunk - (slot in on_the_way) for slot, state in there.items() if state.epoch == move.epoch},
        epoch=move.epoch,
    )
    return f"{move} goes on: what had come to {lost!r} before is lost"


async def recover(
    name: ShardName,
    shards: Mapping[ShardName, Database],
    catalog_database: Database,
    *,
    cluster: str,
    older: bool = False,
    report: Callable[[int], None] = lambda _: None,
) -> Recovery:
    """Brings the stray jobs of a shard to where their orgs live, but for those that are known there or on a former
    owner: these are cancelled on the stray shard. `older`: also those whose ids were made more than 7 days ago; of them
    it may be forgotten that they have run. `report` hears how many jobs were dealt with. Raises ShardUnavailable,
    Misconfigured; then it may be called again."""
    places = _Places(shards, catalog_database, cluster=cluster)
    shard = await places.at(name)
    known = await catalog.read(catalog_database)
    await _insist(shard, lambda: strays.fence(shard, known))
    recovery, done = Recovery(), Counter[tuple[OrgId, ShardName, bool]]()
    for left in await strays.count(shard, known):
        while True:
            parts = await strays.read(shard, left.slot, older=older)
            if not parts and not await strays.set_aside(shard, left.slot):
                break
            by_org: dict[OrgId, list[Strays]] = {}
            for part in parts:
                by_org.setdefault(part.org, []).append(part)
            stayed = 0
            for org, some in by_org.items():
                known = await catalog.read(catalog_database, known)
                ended = await _bring(shard, places, known, left.slot, some)
                if ended is None:
                    stayed += sum(len(part.ids) for part in some)
                else:
                    home, brought, others = ended
                    done[org, home, True] += brought
                    done[org, home, False] += others
                    report(sum(done.values()))
            if stayed:
                # They move just now: another run finds them where they are then.
                break
    after = await strays.count(shard, known)
    recovery.leased = sum(left.leased for left in after)
    for left in after:
        young = sum(len(part.ids) for part in await strays.read(shard, left.slot, older=False))
        recovery.moving += young + left.free + left.dead
        recovery.older += max(0, left.departing - young)
    for org, home in dict.fromkeys((org, home) for org, home, _ in done):
        recovery.orgs.append(Brought(org=org, home=home, brought=done[org, home, True], known=done[org, home, False]))
    return recovery


class _Places:
    """The databases of the shards. Each is examined before it is used for the first time: one that is not needed may be
    away."""

    def __init__(self, shards: Mapping[ShardName, Database], catalog_database: Database, *, cluster: str) -> None:
        self.catalog = catalog_database
        self._shards = shards
        self._cluster = cluster
        self._examined: set[ShardName] = set()

    async def at(self, name: ShardName) -> Database:
        """Raises Misconfigured, ShardUnavailable."""
        database = _at(self._shards, name)
        if name not in self._examined:
            await identity.examine(database, self.catalog, cluster=self._cluster)
            self._examined.add(name)
        return database


async def _bring(
    shard: Database, places: _Places, known: Catalog, slot: Slot, parts: Sequence[Strays]
) -> tuple[ShardName, int, int] | None:
    """Deals with these jobs of one org. Answers where they live, how many were brought there, and how many were known.
    None: the org moves just now."""
    org = parts[0].org
    placement = known.placement(org)
    if not placement.at_rest or shard.name in placement.reads:
        return None
    home = await places.at(placement.writes[0])
    ids = [job_id for part in parts for job_id in part.ids]
    # Former owners take no more jobs: what they say stays true.
    known_on: dict[JobId, ShardName] = {}
    for former in placement.former:
        if former.shard not in (shard.name, home.name):
            rest = [job_id for job_id in ids if job_id not in known_on]
            for job_id in await _ended(await places.at(former.shard), org, rest):
                known_on[job_id] = former.shard
    queues = {part.queue for part in parts}
    own = [row for row in await moving.read_queues(shard, [slot]) if row.org == org and row.queue in queues]
    await moving.make_queues(home, [row._replace(slot=known.slot(org)) for row in own])
    brought = set[JobId]()
    try:
        for _ in range(_TRIES_MAX):
            rest = [job_id for job_id in ids if job_id not in known_on and job_id not in brought]
            known_on |= dict.fromkeys(await strays.known(home, org, rest), home.name)
            rest = [job_id for job_id in rest if job_id not in known_on]
            if not rest:
                break
            brought |= await strays.bring(home, parts, rest, epoch=placement.epoch) or set()
        else:
            raise ShardUnavailable(home.name, f"stray jobs of org {org!r} would not stand still; try again")
    except NotTaken:
        return None
    # The other copy goes now. If the home loses what it has, that must be noticed.
    await history.mark(home, places.catalog)
    if brought:
        departed = [Departed(slot=slot, chunk=0, org=part.org, queue=part.queue, jobs="") for part in parts]
        await moving.tell_arrivals(home, departed)
    deleted, cancelled = await strays.end(shard, slot, org, brought=brought, known_on=known_on)
    return home.name, deleted, cancelled


async def _ended(former: Database, org: OrgId, ids: Sequence[JobId]) -> set[JobId]:
    """Those that a former owner knows, but for jobs that live there: these are stray as well."""
    found = await strays.known(former, org, ids)
    if not found:
        return found
    records = await Store(former).get(org, sorted(found), include_payload=False)
    return found - {record.id for record in records if record.state not in _FINISHED}


def _at(shards: Mapping[ShardName, Database], name: ShardName) -> Database:
    if name not in shards:
        raise Misconfigured(
            f"shard {name!r} must be asked, or must change, and by the cluster file it is not there or takes no changes"
        )
    return shards[name]


async def _insist(shard: Database, act: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(_TRIES_MAX):
        if await act():
            return
        await asyncio.sleep(random.uniform(0, _PAUSE_S_MAX))
    raise ShardUnavailable(shard.name, "enqueues, or changes of queues, were under way all the time; try again")
