"""How many connections a router process has to a shard. The pages for operators state this number, because
`max_connections` must allow for it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import LiteralString

import grpc
import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.postgres import Server
from tests.routers import CHECKOUT, PATIENCE_S, running_routers, stubs, until, write_cluster
from windrow.v1 import admin_pb2

FOR_CALLS = 3
# The pages name these connections besides those for calls. FURTHER: up to two connections for lists and counts, and one
# that listens. OF_CATALOG: the connections that the catalog's database has in addition.
FURTHER, OF_CATALOG = 3, 2
PAGES = ("docs/runbook.md", "deploy/README.md", "deploy/cluster.example.toml")
ORGS = [f"org-{number}" for number in range(8)]
COUNT: LiteralString = (
    "SELECT datname, count(*) FROM pg_stat_activity WHERE application_name LIKE 'windrow%' GROUP BY datname"
)


def test_a_process_has_as_many_connections_as_the_pages_say(
    postgres: Server, spare_dsn: str, empty_dsn: str, tmp_path: Path
) -> None:
    for page in PAGES:
        told = re.findall(r"connections_per_shard`? \+ (\d+)", (CHECKOUT / page).read_text())
        assert {page: set(told)} == {page: {str(FURTHER)}}
    dsns = {"s1": spare_dsn, "s2": empty_dsn}
    first, second = (str(conninfo_to_dict(dsn)["dbname"]) for dsn in dsns.values())
    expected = {first: FOR_CALLS + FURTHER + OF_CATALOG, second: FOR_CALLS + FURTHER}
    with (
        running_routers(write_cluster(tmp_path / "cluster.toml", dsns, connections=FOR_CALLS)) as routers,
        stubs(routers.address) as both,
        psycopg.connect(postgres.superuser_dsn, autocommit=True) as watcher,
        ThreadPoolExecutor(2 * len(ORGS)) as threads,
        ExitStack() as locks,
    ):
        # A call that waits too long for the lock fails.
        def lists(org: str) -> None:
            with suppress(grpc.RpcError):
                both.admin.ListQueues(admin_pb2.ListQueuesRequest(org=org), timeout=PATIENCE_S)

        def counts(org: str) -> None:
            with suppress(grpc.RpcError):
                both.admin.GetStats(admin_pb2.GetStatsRequest(org=org), timeout=PATIENCE_S)

        # On each shard one list and one count wait for the lock at the same time. The other lists and counts wait for
        # these two.
        for dsn in dsns.values():
            locks.enter_context(psycopg.connect(dsn)).execute("LOCK windrow.queue IN ACCESS EXCLUSIVE MODE")
        calls = [threads.submit(call, org) for org in ORGS for call in (lists, counts)]
        until(lambda: dict(watcher.execute(COUNT).fetchall()) == expected, "all connections are made")
        locks.close()
        for one in calls:
            one.result()
