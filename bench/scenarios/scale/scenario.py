"""Measures what the catalog, the doorbells and the connections cost if a cluster has 1,000 shards and 200 router
processes.

Runs the real code of these parts, as many times as there are router processes, against one real Postgres. The scenario
does not start 1,000 Postgres servers. It measures with a few shards what each shard adds to a router process, and with
one shard what each router process adds to a shard. The last table says which figures are extrapolated, and from what.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import struct
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import psutil

from bench import cpu
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.scenarios.scale.crew import Crew, Server, open_crew
from bench.scenarios.scale.parts import CLUSTER
from bench.scenarios.scale.tables import Bell, Change, Enqueued, Figures, Member, Read, Router
from bench.scenarios.scale.tables import Catalog as CatalogFigures
from bench.spread import percentile
from cli.local import in_thread
from embedded import open_clusters
from proof.arguments import number, numbers, positive
from proof.cluster_file import ClusterFile, Entry
from proof.environment import postgres
from router.gate.connections import _BYTES_RECEIVED_AT
from shard.placement import catalog, marks, statements
from shard.placement.catalog import Catalog
from shard.placement.marks import Made
from shard.placement.slots import SLOTS
from shard.postgres import schema
from shard.postgres.pool import Database
from shard.vocabulary import CATALOG, Micros, ShardName, Slot

_SEEN_S_MAX = 10.0
_LOOK_S = 0.05
_CHANGE_S = 2.0
# Each of the three kinds of read of the catalog is repeated for at least this share of the plan's `seconds`.
_READ_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    # The number of shards in the catalog, and the number of router processes that use the catalog, or that use one
    # shard.
    shards: int = 1000
    routers: int = 200
    # How many connections each router process has for the queue of the one shard. The default of 4 would need 600 more
    # backends.
    connections: int = 1
    # How many processes the parts are divided among.
    processes: int = 4
    changes: int = 12
    # How many times a second all router processes together ring, and how many router processes listen.
    rings: tuple[int, ...] = (10, 50, 100)
    listeners: tuple[int, ...] = (2, 50, 200)
    # Jobs a second. All router processes but one have a consumer of the queue.
    jobs: tuple[int, ...] = (10,)
    # The numbers of shards with which one router process is measured.
    members: tuple[int, ...] = (8, 32)
    seconds: float = 10.0
    # How long to wait before a measurement. This is longer than the first marks of shards take
    # (shard/placement/marks.py).
    settle_s: float = 8.0


async def measure(plan: Plan, bench: Bench) -> Found:
    most = 40 + plan.routers * (plan.connections + 4) + max(plan.members) * 6
    settings = {"max_connections": f"{most}", "superuser_reserved_connections": "10"}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="windrow-bench-")))
        bench.say("starting one Postgres server")
        clusters = await stack.enter_async_context(
            in_thread(open_clusters(["scale"], ephemeral=True, settings=settings))
        )
        server = Server(cluster=clusters["scale"])
        bench.postgres.update(await asyncio.to_thread(postgres, server.cluster.dsn))
        found = await _catalog(plan, bench, server)
        bells = await _bells(plan, bench, server)
        member, enqueued = await _member(plan, bench, server, folder)
        routers = [await _router(plan, bench, server, folder, count) for count in plan.members]
    figures = Figures(
        shards=plan.shards,
        processes=plan.routers,
        catalog=found,
        bells=bells,
        member=member,
        enqueued=enqueued,
        routers=routers,
    )
    return Found(scenario="scale", plan=asdict(plan), samples=figures.told(), tables=figures.tables())


# ── The catalog ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def _catalog(plan: Plan, bench: Bench, server: Server) -> CatalogFigures:
    dsn = await asyncio.to_thread(server.make_database, "catalog")
    names = [ShardName(f"s{number}") for number in range(1, plan.shards + 1)]
    async with _open(CATALOG, dsn) as database:
        await schema.migrate(database, cluster=None)
        first = await catalog.found(database, cluster=CLUSTER, weights=dict.fromkeys(names, 1.0))
        for name in names:
            await database.run(statements.RECORD_SHARD, {"shard": name, "id": str(uuid4())})
            made = Made(number=1, token=str(uuid4()), at=Micros(0), before=None, oldest=None)
            await marks.confirm(database, name, made)
        steps = _steps(database)
        await anext(steps)
        now = await catalog.read(database)
        reads = [
            await _read(server, database, what, known, plan.seconds * _READ_SHARE)
            for what, known in (
                (f"all of it: 16,384 slots on {plan.shards:,} shards", None),
                ("nothing has changed", now),
                ("one slot has changed", first),
            )
        ]
        for read in reads:
            bench.say(
                f"a read of the catalog, {read.what}: {read.bytes:,.0f} bytes, {read.postgres_ms:.2f} ms of Postgres"
            )
        crew = open_crew(
            server, "bench_catalog", "copies", count=plan.routers, processes=plan.processes, dsn=dsn, shards=names
        )
        async with crew as (copies, made_in):
            await copies.all("told")
            bench.say(f"{plan.routers} processes have read the catalog, within {made_in.seconds:.1f} s")
            await asyncio.sleep(plan.settle_s)
            idle = await copies.rest(plan.seconds)
            changes = await _changes(copies, steps, plan)
            bench.say(f"{len(changes)} changes of the catalog were seen by all of them")
    return CatalogFigures(copies=plan.routers, reads=reads, made=made_in, idle=idle, changes=changes)


async def _changes(copies: Crew, steps: AsyncGenerator[int], plan: Plan) -> list[Change]:
    found: list[Change] = []
    for _ in range(plan.changes):
        await copies.all("told")
        before, began_s = await copies.spent(), time.monotonic()
        epoch = await anext(steps)
        late_ms: list[float] = []
        while len(late_ms) < plan.routers and time.monotonic() < began_s + _SEEN_S_MAX:
            await asyncio.sleep(_LOOK_S)
            for seen in await copies.all("told"):
                late_ms += [(at_s - began_s) * 1000 for number, at_s in seen if number >= epoch]
        # Measure each change for the same time, so that the cost of an idle cluster's reads can be subtracted.
        await asyncio.sleep(max(0.0, began_s + _CHANGE_S - time.monotonic()))
        spent = await copies.spent() - before
        found.append(Change(seen=len(late_ms), late_ms=sorted(late_ms), spent=spent))
    return found


async def _steps(database: Database) -> AsyncGenerator[int]:
    """Moves one slot after another to another shard. Yields the epoch of the catalog after each of the three changes
    that a move makes."""
    for slot in range(SLOTS):
        known = await catalog.read(database)
        (source,) = known.slots[slot].writes
        target = next(placement.writes[0] for placement in known.slots if placement.writes[0] != source)
        move = await catalog.begin_move(database, known, [Slot(slot)], target=target)
        assert move is not None
        yield move.epoch
        await catalog.switch_writer(database, move)
        yield (await catalog.read(database, known)).epoch
        await catalog.finish_move(database, move, move.slots)
        yield (await catalog.read(database, known)).epoch


async def _read(server: Server, database: Database, what: str, known: Catalog | None, seconds_min: float) -> Read:
    session = next(iter(database._pool.sessions))
    received, spent = _received(session.fileno()), (time.monotonic(), time.process_time(), _cpu(server))
    reads = 0
    while not reads or time.monotonic() < spent[0] + seconds_min:
        await catalog.look(database, known)
        reads += 1
    seconds, parts_s, postgres_s = (
        after - before
        for after, before in zip((time.monotonic(), time.process_time(), _cpu(server)), spent, strict=True)
    )
    return Read(
        what=what,
        bytes=(_received(session.fileno()) - received) / reads,
        took_ms=seconds / reads * 1000,
        router_ms=parts_s / reads * 1000,
        postgres_ms=postgres_s / reads * 1000,
    )


def _received(file: int) -> int:
    with socket.socket(fileno=os.dup(file)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
    (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)
    return int(received)


def _cpu(server: Server) -> float:
    return cpu.of_trees([server.cluster.pid or 0])[0]


# ── One shard ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _bells(plan: Plan, bench: Bench, server: Server) -> list[Bell]:
    found: list[Bell] = []
    dsn = await asyncio.to_thread(server.make_database, "bells")
    for listeners in plan.listeners:
        processes = min(plan.processes, listeners)
        async with open_crew(server, "bench_bells", "bells", count=listeners, processes=processes, dsn=dsn) as (
            bells,
            _,
        ):
            await asyncio.sleep(1.0)
            for per_s in plan.rings:
                await bells.all("told")
                before = await bells.spent()
                # One doorbell rings at most about 100 times a second. Therefore one doorbell in each process rings.
                await bells.all("ring", per_s=per_s / processes, seconds=plan.seconds)
                spent = await bells.spent() - before
                told = await bells.all("told")
                late_us = sorted(late for one in told for late in one["late_us"])
                # Each ring is heard by every doorbell except the one that rang.
                rings = sum(one["count"] for one in told) / (listeners - 1)
                found.append(Bell(listeners=listeners, rings=rings, late_us=late_us, spent=spent))
                p99_ms = percentile(late_us, 0.99) / 1000
                bench.say(f"{listeners} listeners, {rings / spent.seconds:,.0f} rings/s: {p99_ms:,.1f} ms p99")
    return found


async def _member(plan: Plan, bench: Bench, server: Server, folder: Path) -> tuple[Member, list[Enqueued]]:
    config = await _cluster(server, folder, "one", 1)
    crew = open_crew(
        server,
        "bench_one_1",
        "fleets",
        count=plan.routers,
        processes=min(plan.processes, plan.routers),
        config=str(config),
        connections=plan.connections,
    )
    async with crew as (fleets, made_in):
        bench.say(f"{plan.routers} router processes have one shard, after {made_in.seconds:.1f} s")
        await asyncio.sleep(plan.settle_s)
        backends = await asyncio.to_thread(server.backends, "bench_one_1")
        idle = await fleets.rest(plan.seconds)
        enqueued: list[Enqueued] = []
        # The first job creates the queue.
        await fleets.one(0, "enqueue", per_s=1, seconds=1)
        for at in range(len(fleets.processes)):
            await fleets.one(at, "consume", skip=0 if at else 1)
        await asyncio.sleep(plan.settle_s)
        waiting = await fleets.rest(plan.seconds)
        for per_s in plan.jobs:
            await fleets.all("told")
            before = await fleets.spent()
            jobs = await fleets.one(0, "enqueue", per_s=per_s, seconds=plan.seconds)
            spent = await fleets.spent() - before
            told = await fleets.all("told")
            late_us = sorted(late for one in told for late in one["late_us"])
            enqueued.append(Enqueued(jobs=jobs, late_us=late_us, spent=spent))
            bench.say(f"{plan.routers - 1} consumers, {per_s} jobs/s: {spent.statements / jobs:,.0f} statements a job")
    member = Member(
        count=plan.routers,
        connections=plan.connections,
        made=made_in,
        backends=backends,
        idle=idle,
        waiting=waiting,
    )
    return member, enqueued


# ── One router process ───────────────────────────────────────────────────────────────────────────────────────────────


async def _router(plan: Plan, bench: Bench, server: Server, folder: Path, shards: int) -> Router:
    config = await _cluster(server, folder, f"of{shards}", shards)
    order = {"config": str(config), "connections": 4}
    # The first start creates the schemas, and is not measured.
    async with open_crew(server, f"bench_of{shards}_1", "fleets", count=1, processes=1, **order):
        pass
    async with open_crew(server, f"bench_of{shards}_1", "fleets", count=1, processes=1, **order) as (fleets, made_in):
        bench.say(f"a router process has {shards} shards, after {made_in.seconds:.1f} s")
        await asyncio.sleep(plan.settle_s)
        spent = await fleets.rest(plan.seconds)
        (process,) = map(psutil.Process, fleets.pids)
        return Router(
            shards=shards,
            made=made_in,
            idle=spent,
            files=process.num_fds(),
            resident_mib=process.memory_info().rss / 2**20,
        )


async def _cluster(server: Server, folder: Path, name: str, shards: int) -> Path:
    """Makes databases for a catalog and for shards. Returns the cluster file."""
    catalog_dsn = await asyncio.to_thread(server.make_database, f"{name}_0")
    entries = [
        Entry(name=f"s{number}", dsn=await asyncio.to_thread(server.make_database, f"{name}_{number}"))
        for number in range(1, shards + 1)
    ]
    file = ClusterFile(path=folder / f"{name}.toml", name=CLUSTER, entries=entries, catalog_dsn=catalog_dsn)
    file.save()
    return file.path


@contextlib.asynccontextmanager
async def _open(name: ShardName, dsn: str) -> AsyncGenerator[Database]:
    database = Database(name, dsn, connections=1, may_scan=True)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


def _listeners(text: str) -> tuple[int, ...]:
    """Parses numbers of listeners, at least 2: one listener rings, and another hears the ring."""
    return tuple(map(number(400, 2), text.split(",")))


def _options(parser: argparse.ArgumentParser) -> None:
    default = Plan()
    parser.add_argument("--shards", type=number(1000), default=default.shards, help="in the catalog; 1000")
    parser.add_argument(
        "--routers", type=number(400, 3), default=default.routers, help="processes of all routers together; 200"
    )
    parser.add_argument(
        "--connections", type=number(4), default=default.connections, help="of each of them for the queue of a shard; 1"
    )
    parser.add_argument(
        "--members", type=numbers(100), default=default.members, metavar="N,N", help="shards of one process; 8,32"
    )
    parser.add_argument(
        "--listeners", type=_listeners, default=default.listeners, metavar="N,N", help="of doorbells; 2,50,200"
    )
    parser.add_argument("--rings", type=numbers(1000), default=default.rings, metavar="N,N", help="a second; 10,50,100")
    parser.add_argument("--jobs", type=numbers(1000), default=default.jobs, metavar="N,N", help="a second; 10")
    parser.add_argument("--changes", type=number(1000), default=default.changes, help="of the catalog, 2 s each; 12")
    parser.add_argument("--seconds", type=positive, default=default.seconds, help="of each measurement; 10")
    parser.add_argument("--settle-seconds", type=positive, default=default.settle_s, help="before it; 8")
    parser.add_argument("--processes", type=number(16), default=default.processes, help="that have all parts; 4")


SCENARIO = Scenario(
    help="what the catalog, the doorbells and the connections cost at 1,000 shards and 200 router processes",
    options=_options,
    plan=lambda given: Plan(
        shards=given.shards,
        routers=given.routers,
        connections=given.connections,
        members=given.members,
        listeners=given.listeners,
        rings=given.rings,
        jobs=given.jobs,
        changes=given.changes,
        seconds=given.seconds,
        settle_s=given.settle_seconds,
        processes=given.processes,
    ),
    measure=measure,
    full=lambda _: Plan(),
    quick=None,
)
