"""The measuring itself: rounds in which every system takes its turn, so that what else the machine does hits all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench import cpu
from bench.clients import Clients, open_clients
from bench.environment import postgres
from bench.system import Site
from bench.systems import LIMIT, WINDROW, load
from cli.local import LocalCluster, local_cluster

_PAYLOAD_BYTES = 200
_PREPARE_S_PAUSE = 0.2


class Figure(StrEnum):
    # Into empty queues.
    ENQUEUE = "enqueue"
    # Dequeue and ack, of what was filled in before.
    DRAIN = "drain"
    # Enqueue, dequeue and ack, all going on at once, from the first job in to the last job out.
    LIFE = "whole life"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured, on a cluster of its own for each number of shards."""

    shards: tuple[int, ...] = (1, 2)
    batches: tuple[int, ...] = (100,)
    # Of a run; None: enough for a few seconds.
    jobs: int | None = None
    runs: int = 5
    # Client processes, and how many calls of each sort one of them has under way at a time.
    clients: int = 2
    callers: int = 4
    routers: int = 2

    @property
    def turns(self) -> int:
        """How often a system takes its turn, warm-ups included."""
        return len(self.shards) * len(self.batches) * (self.runs + 1) * len(_SYSTEMS)

    def jobs_of(self, batch: int) -> int:
        if self.jobs is not None:
            return self.jobs
        return 100_000 if batch >= 100 else 20_000 if batch >= 10 else 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One figure of one run, as it was measured."""

    system: str
    shards: int
    batch: int
    run: int
    figure: Figure
    jobs: int
    seconds: float
    # CPU seconds, all processes of a sort together.
    client_cpu_s: float
    router_cpu_s: float
    postgres_cpu_s: float
    # What everything else on this machine took.
    others_cpu_s: float
    load_average: float

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.seconds


_SYSTEMS = (WINDROW, LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    samples: list[Sample]
    postgres: dict[str, object]


async def measure(plan: Plan, *, say: Callable[[str], None], sampled: Callable[[Sample | None], None]) -> Measured:
    """Measures all of the plan. `say` is told what begins; `sampled` gets every sample, and None at the end of each
    turn. Raises bench.system.Wrong when a system does not do what it is asked, embedded.EmbeddedError."""
    samples: list[Sample] = []
    server: dict[str, object] = {}
    for shards in plan.shards:
        say(f"starting {shards} shard(s) and {plan.routers} router processes")
        async with _stage(plan, shards) as stage:
            server = await asyncio.to_thread(postgres, next(iter(stage.cluster.postgres.values())).dsn)
            for batch in plan.batches:
                for run in range(plan.runs + 1):
                    # Who goes first changes with each round.
                    turns = list(stage.clients) if run % 2 else list(stage.clients)[::-1]
                    for system in turns:
                        what = f"run {run} of {plan.runs}" if run else "warm-up"
                        say(f"{shards} shard(s), batch {batch}, {what}: {load(system).title}")
                        turn = _Turn(stage=stage, system=system, shards=shards, batch=batch, run=run)
                        async for sample in turn.samples(plan.jobs_of(batch)):
                            if run:
                                samples.append(sample)
                                sampled(sample)
                        sampled(None)
    return Measured(samples=samples, postgres=server)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A cluster, and the client processes of every system, which wait for their turns."""

    cluster: LocalCluster
    clients: dict[str, Clients]


@contextlib.asynccontextmanager
async def _stage(plan: Plan, shards: int) -> AsyncGenerator[_Stage, None]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="windrow-bench-")))
        cluster = await stack.enter_async_context(
            local_cluster(shards=shards, processes=plan.routers, listen="127.0.0.1:0", ephemeral=True)
        )
        site = Site(
            address=cluster.address,
            dsns={name: server.dsn for name, server in cluster.postgres.items()},
            callers=plan.callers,
            payload=secrets.token_hex(_PAYLOAD_BYTES),
        )
        clients: dict[str, Clients] = {}
        for system in _SYSTEMS:
            tally = folder / f"tally-{len(clients)}"
            tally.touch()
            clients[system] = await stack.enter_async_context(
                open_clients(system, site, count=plan.clients, tally=tally)
            )
        yield _Stage(cluster=cluster, clients=clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One system's turn: fill, drain, check; then whole lives, check."""

    stage: _Stage
    system: str
    shards: int
    batch: int
    run: int

    async def samples(self, jobs: int) -> AsyncGenerator[Sample, None]:
        clients = self.stage.clients[self.system]
        count = len(clients.pids)

        def share(at: int) -> int:
            return jobs * (at + 1) // count - jobs * at // count

        await self._prepare(clients)
        yield await self._timed(Figure.ENQUEUE, jobs, "enqueue", lambda at: {"jobs": share(at)})
        yield await self._timed(Figure.DRAIN, jobs, "drain", lambda _: {"total": jobs})
        await clients.first("check", jobs=jobs)
        await self._prepare(clients)
        yield await self._timed(Figure.LIFE, jobs, "live", lambda at: {"jobs": share(at), "total": jobs})
        await clients.first("check", jobs=jobs)

    async def _prepare(self, clients: Clients) -> None:
        name = f"bench-{secrets.token_hex(6)}"
        # One makes what the others then find.
        await clients.first("prepare", run=name)
        await clients.all("prepare", lambda _: {"run": name})
        await asyncio.sleep(_PREPARE_S_PAUSE)

    async def _timed(self, figure: Figure, jobs: int, verb: str, order: Callable[[int], dict[str, object]]) -> Sample:
        clients = self.stage.clients[self.system]
        load_average = os.getloadavg()[0]
        before = self._cpu(clients)
        began_s = time.monotonic()
        seconds = await clients.all(verb, lambda at: {"batch": self.batch, **order(at)})
        spent = self._cpu(clients).less(before)
        # What came between the clocks of the processes and ours is small, and is nobody's: the share stays right.
        others_s = max(0.0, spent.machine_s - spent.client_s - spent.router_s - spent.postgres_s - spent.own_s)
        return Sample(
            system=load(self.system).title,
            shards=self.shards,
            batch=self.batch,
            run=self.run,
            figure=figure,
            jobs=jobs,
            seconds=seconds,
            client_cpu_s=spent.client_s,
            router_cpu_s=spent.router_s,
            postgres_cpu_s=spent.postgres_s,
            others_cpu_s=others_s * seconds / (time.monotonic() - began_s),
            load_average=load_average,
        )

    def _cpu(self, clients: Clients) -> _Cpu:
        return _Cpu(
            client_s=cpu.of_processes(clients.pids),
            router_s=cpu.of_processes(self.stage.cluster.routers.pids),
            postgres_s=sum(cpu.of_tree(server.pid) for server in self.stage.cluster.postgres.values() if server.pid),
            own_s=cpu.of_processes([os.getpid()]),
            machine_s=cpu.of_machine(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cpu:
    client_s: float
    router_s: float
    postgres_s: float
    # This process's.
    own_s: float
    machine_s: float

    def less(self, before: _Cpu) -> _Cpu:
        return _Cpu(
            client_s=self.client_s - before.client_s,
            router_s=self.router_s - before.router_s,
            postgres_s=self.postgres_s - before.postgres_s,
            own_s=self.own_s - before.own_s,
            machine_s=self.machine_s - before.machine_s,
        )
