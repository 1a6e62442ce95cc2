"""Measures the cost of some work: the CPU time of each kind of process, and how much the databases wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import psycopg

from bench import cpu

# A Postgres process that has been idle for this long has reported all of its counters. Before that, it reports at most
# once a second, and its newest counts may be missing.
COUNTED_S = 11.0

_COUNTS = """
SELECT
    d.xact_commit, d.xact_rollback,
    coalesce(t.updated - t.hot, 0), coalesce(t.hot, 0), coalesce(t.deleted, 0)
FROM pg_stat_database d
CROSS JOIN (
    SELECT sum(n_tup_upd)::bigint AS updated, sum(n_tup_hot_upd)::bigint AS hot, sum(n_tup_del)::bigint AS deleted
    FROM pg_stat_all_tables
    WHERE schemaname NOT IN ('pg_catalog', 'information_schema')
) t
WHERE d.datname = current_database()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """For each kind of process, the CPU seconds of all its processes together."""

    # The time of the processes that only enqueue. A process that enqueues and works counts as a worker.
    producer_s: float
    worker_s: float
    router_s: float
    postgres_s: float
    # The CPU time of this process.
    own_s: float
    machine_s: float

    def __sub__(self, before: Spent) -> Spent:
        return Spent(**{each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)})

    @property
    def others_s(self) -> float:
        """CPU seconds of everything else on this machine."""
        measured_s = self.producer_s + self.worker_s + self.router_s + self.postgres_s + self.own_s
        return max(0.0, self.machine_s - measured_s)


def spent(
    *, producers: Sequence[int], workers: Sequence[int], routers: Sequence[int], postgres: Sequence[int | None]
) -> Spent:
    # Count child processes too, because peers run in child processes of a client process.
    producer_s, worker_s, postgres_s = cpu.of_trees(producers, workers, filter(None, postgres))
    return Spent(
        producer_s=producer_s,
        worker_s=worker_s,
        router_s=cpu.of_processes(routers),
        postgres_s=postgres_s,
        own_s=cpu.of_processes([os.getpid()]),
        machine_s=cpu.of_machine(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How much some databases wrote. `wal_bytes` counts the WAL of their whole servers, and the other fields count only
    these databases."""

    wal_bytes: int = 0
    commits: int = 0
    # Dead row versions that need a vacuum. They were left by deletes, and by updates that were not HOT.
    dead_rows: int = 0
    # Dead row versions that HOT updates left. A later access to the page can remove them without a vacuum.
    dead_rows_hot: int = 0

    def __sub__(self, before: Written) -> Written:
        return Written(**{each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)})


def written(dsns: Mapping[str, Sequence[str]]) -> Written:
    """Returns how much these databases have written so far. `dsns`: the DSNs of the databases of each server."""
    wal_bytes = commits = dead = hot = 0
    for databases in dsns.values():
        for at, dsn in enumerate(databases):
            with psycopg.connect(dsn, autocommit=True) as connection:
                row = connection.execute(_COUNTS).fetchone()
                assert row is not None
                commits += row[0] + row[1]
                dead += row[2] + row[4]
                hot += row[3]
                if not at:
                    lsn = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
                    assert lsn is not None
                    wal_bytes += lsn[0]
    return Written(wal_bytes=wal_bytes, commits=commits, dead_rows=dead, dead_rows_hot=hot)
