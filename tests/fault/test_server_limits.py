"""A Postgres server has no transaction ids or no connections left. These tests show what clients and operators see, and
that nothing is lost when an operator repairs the server as docs/runbook.md says."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
from pathlib import Path

import grpc
import psycopg
import pytest

from embedded import Cluster, find_binaries
from tests.command import windrow
from tests.postgres import Server
from tests.routers import PATIENCE_S, Stubs, ending, running_routers, stubs, until, write_cluster
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2

QUEUE = "q"
_numbers = itertools.count(1)
# Postgres cannot compare transaction ids whose distance is _IDS. When only _STOP ids remain before that distance,
# Postgres assigns no more ids.
_IDS, _STOP = 2**31, 3_000_000
# How many transactions have their status in one file of `pg_xact`, and the size of this file in bytes. The status of a
# transaction has two bits.
_IDS_OF_FILE, _BYTES_OF_FILE = 2**20, 2**18


def shut_down(server: Cluster) -> None:
    """Writes a checkpoint and ends the server. Keeps its folder, which stop() would delete."""
    assert server.pid is not None
    with ending([server.pid]):
        os.kill(server.pid, signal.SIGINT)


def use_up_transaction_ids(server: Cluster) -> None:
    """Sets the next transaction id to one of the last ids that Postgres assigns. The server must not run."""
    last = (_IDS - _STOP // 2) // _IDS_OF_FILE * _IDS_OF_FILE
    data = server.folder / "data"
    states = data / "pg_xact" / f"{last // _IDS_OF_FILE:04X}"
    states.write_bytes(bytes(_BYTES_OF_FILE))
    owner = data.stat()
    program = find_binaries().program("pg_resetwal")
    subprocess.run(
        [program, "-x", str(last), str(data)], check=True, capture_output=True, user=owner.st_uid, group=owner.st_gid
    )


def use_up_connections(server: Cluster, others: contextlib.ExitStack) -> None:
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            others.enter_context(contextlib.closing(psycopg.connect(server.dsn)))


def enqueue(both: Stubs, org: str) -> str:
    job = job_pb2.NewJob(template=job_pb2.JobTemplate(queue=QUEUE, kind="k"))
    request = queue_pb2.EnqueueRequest(org=org, jobs=[job])
    return both.queue.Enqueue(request, timeout=PATIENCE_S).results[0].id


def all_reachable(both: Stubs) -> bool:
    listed = both.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S)
    return all(shard.reachable for shard in listed.shards)


def org_on(both: Stubs, shard: str) -> str:
    for _ in range(1000):
        org = f"org-{next(_numbers)}"
        made = both.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
        if made.queue.shard == shard:
            return org
    raise AssertionError(f"no org in a thousand lives on shard {shard!r}")


def is_stored(both: Stubs, org: str) -> bool:
    try:
        enqueue(both, org)
    except grpc.RpcError:
        return False
    return True


def refusal(both: Stubs, org: str, why: str) -> grpc.RpcError | None:
    """Makes an enqueue. Returns its error if it fails for this reason, and otherwise None."""
    try:
        enqueue(both, org)
    except grpc.RpcError as error:
        return error if why in str(error.details()) else None
    return None


@pytest.mark.turns(2)
def test_a_server_without_transaction_ids_takes_no_writes_loses_nothing_and_is_mended_as_the_runbook_says(
    postgres: Server, tmp_path: Path
) -> None:
    with Cluster("no-ids", ephemeral=True) as server:
        with psycopg.connect(server.superuser_dsn, autocommit=True) as connection:
            # Autovacuum looks at each database often, so that the test does not wait for it.
            connection.execute("ALTER SYSTEM SET autovacuum_naptime = '1s'")
        config = write_cluster(tmp_path / "cluster.toml", {"s1": postgres.create("beside_no_ids"), "s2": server.dsn})
        with running_routers(config) as routers, stubs(routers.address) as both:
            until(lambda: all_reachable(both), "both shards have their tables")
            healthy, stuck = org_on(both, "s1"), org_on(both, "s2")
            stored = enqueue(both, stuck)
            shut_down(server)
            use_up_transaction_ids(server)
            server.start()
            with psycopg.connect(server.dsn) as holder:
                # Autovacuum cannot freeze this table, as if something held a snapshot.
                holder.execute("LOCK TABLE windrow.job IN SHARE UPDATE EXCLUSIVE MODE")
                until(lambda: refusal(both, stuck, "wraparound") is not None, "the shard answers, and takes no writes")
                refused = refusal(both, stuck, "wraparound")
                assert refused is not None
                assert refused.code() is grpc.StatusCode.UNAVAILABLE
                get = queue_pb2.GetJobsRequest(org=stuck, ids=[stored])
                assert [job.id for job in both.queue.GetJobs(get, timeout=PATIENCE_S).jobs] == [stored]
                assert enqueue(both, healthy)

                def is_told() -> bool:
                    found = windrow("doctor", "--shard", "s2", "--config", str(config))
                    assert found.code == 1
                    assert "VACUUM (FREEZE, TRUNCATE false);" in found.out
                    return "as a superuser, in database windrow" in found.out

                # Autovacuum freezes the other databases, one after another.
                until(is_told, "the doctor names the database that cannot be frozen")
            # The lock is gone, so the databases can be vacuumed. Autovacuum does this for `template0`, which accepts no
            # connections.
            for database in ("windrow", "postgres", "template1"):
                with psycopg.connect(server.superuser_dsn, dbname=database, autocommit=True) as connection:
                    connection.execute("VACUUM (FREEZE, TRUNCATE false)")
            until(lambda: is_stored(both, stuck), "the shard takes writes again")
            get = queue_pb2.GetJobsRequest(org=stuck, ids=[stored])
            assert [job.id for job in both.queue.GetJobs(get, timeout=PATIENCE_S).jobs] == [stored]
            assert both.books("s2")["s2", stuck].balanced


@pytest.mark.turns(2)
def test_running_routers_serve_on_when_others_use_all_connections_and_a_new_one_when_some_are_free_again(
    postgres: Server, tmp_path: Path
) -> None:
    with Cluster("no-connections", ephemeral=True) as server, contextlib.ExitStack() as others:
        config = write_cluster(
            tmp_path / "cluster.toml", {"s1": postgres.create("beside_no_connections"), "s2": server.dsn}
        )
        with running_routers(config) as routers, stubs(routers.address) as both:
            until(lambda: all_reachable(both), "both shards have their tables")
            stuck = org_on(both, "s2")
            use_up_connections(server, others)
            assert enqueue(both, stuck)
            with running_routers(config) as late, stubs(late.address) as newcomer:
                until(lambda: refusal(newcomer, stuck, "connection slots") is not None, "the new router says why")
                refused = refusal(newcomer, stuck, "connection slots")
                assert refused is not None
                assert refused.code() is grpc.StatusCode.UNAVAILABLE
                others.close()
                until(lambda: is_stored(newcomer, stuck), "the new router has connections")
            assert both.books("s2")["s2", stuck].balanced
