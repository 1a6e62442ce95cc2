"""Runs processes that contain parts of many routers (parts.py), and measures what these processes and their Postgres
server spend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psycopg

from bench import cpu
from bench.stage import create_database
from bench.system import Wrong
from embedded import Cluster
from proof.processes import serving

_MODULE = "bench.scenarios.scale.parts"
_ANSWER_S_MAX = 120.0
_STATEMENTS = """
SELECT coalesce(sum(s.calls) FILTER (WHERE d.datname = %s), 0)
FROM pg_stat_statements s
JOIN pg_database d ON d.oid = s.dbid
JOIN pg_roles r ON r.oid = s.userid
WHERE r.rolname <> current_user
"""
_BACKENDS = """
SELECT a.application_name, array_agg(a.pid) FROM pg_stat_activity a WHERE a.datname = %s GROUP BY 1 ORDER BY 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    seconds: float
    # CPU seconds: of the whole Postgres server, and of all processes of the crew together.
    postgres_s: float
    parts_s: float
    # How many statements ran in one database, without the benchmark's own statements. NaN: this server does not count
    # statements.
    statements: float

    def __sub__(self, before: Spent) -> Spent:
        return Spent(**{each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """The server processes of one application, and their mean memory. `private_mib`: without shared memory. `pss_mib`:
    with a proportional share of the shared memory. NaN: the memory cannot be read."""

    application: str
    count: int
    private_mib: float
    pss_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    cluster: Cluster

    def make_database(self, database: str) -> str:
        """Makes a database, and returns its DSN."""
        return create_database(self.cluster.dsn, self.cluster.superuser_dsn, database)

    def statements(self, database: str) -> float:
        try:
            with psycopg.connect(self.cluster.superuser_dsn, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
                row = connection.execute(_STATEMENTS, [database]).fetchone()
        except psycopg.Error:
            return float("nan")
        assert row is not None
        return float(row[0])

    def backends(self, database: str) -> list[Backends]:
        with psycopg.connect(self.cluster.superuser_dsn, autocommit=True) as connection:
            rows = connection.execute(_BACKENDS, [database]).fetchall()
        return [_backends(application, pids) for application, pids in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    server: Server
    # The database whose statements are counted.
    database: str
    processes: Sequence[Process]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    async def one(self, at: int, verb: str, **order: object) -> Any:
        """Sends an order to one process, and returns the answer. Raises Wrong."""
        process = self.processes[at]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"verb": verb, **order}).encode() + b"\n")
        try:
            async with asyncio.timeout(_ANSWER_S_MAX):
                line = await process.stdout.readline()
        except TimeoutError:
            raise Wrong(f"{verb}: no answer within {_ANSWER_S_MAX:g} s") from None
        if not line:
            raise Wrong(f"a process died of {verb!r}; see above")
        return json.loads(line)

    async def all(self, verb: str, **order: object) -> list[Any]:
        return await asyncio.gather(*(self.one(at, verb, **order) for at in range(len(self.processes))))

    async def spent(self) -> Spent:
        return Spent(
            seconds=time.monotonic(),
            postgres_s=cpu.of_trees([self.server.cluster.pid or 0])[0],
            parts_s=cpu.of_processes(self.pids),
            statements=await asyncio.to_thread(self.server.statements, self.database),
        )

    async def rest(self, seconds: float) -> Spent:
        """Measures what is spent while nothing happens."""
        before = await self.spent()
        await asyncio.sleep(seconds)
        return await self.spent() - before


@contextlib.asynccontextmanager
async def open_crew(
    server: Server, database: str, parts: str, *, count: int, processes: int, **order: object
) -> AsyncGenerator[tuple[Crew, Spent], None]:
    """Runs `count` parts of the kind `parts` in `processes` processes, which all begin at the same time. Yields the
    crew, and what the making of the parts cost."""
    shares = [count * (at + 1) // processes - count * at // processes for at in range(processes)]
    orders = [json.dumps({"parts": parts, "count": share, **order}) for share in shares if share]
    postgres_s = cpu.of_trees([server.cluster.pid or 0])[0]
    async with contextlib.AsyncExitStack() as stack:
        started = await asyncio.gather(*(stack.enter_async_context(serving(_MODULE, order=order)) for order in orders))
        crew = Crew(server=server, database=database, processes=[process for process, _ in started])
        took = [tuple(map(float, said.split())) for _, said in started]
        made = Spent(
            seconds=max(seconds for seconds, _ in took),
            postgres_s=cpu.of_trees([server.cluster.pid or 0])[0] - postgres_s,
            parts_s=sum(cpu_s for _, cpu_s in took),
            statements=float("nan"),
        )
        yield crew, made


def _backends(application: str, pids: Sequence[int]) -> Backends:
    private, pss = float("nan"), float("nan")
    with contextlib.suppress(OSError):
        sizes = [_memory(pid) for pid in pids]
        private = sum(size["Private_Clean"] + size["Private_Dirty"] for size in sizes) / len(sizes) / 1024
        pss = sum(size["Pss"] for size in sizes) / len(sizes) / 1024
    return Backends(application=application, count=len(pids), private_mib=private, pss_mib=pss)


def _memory(pid: int) -> dict[str, int]:
    """Returns the values of smaps_rollup (see proc(5)) in KiB, by their names."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
