"""What the shards' tables say when all is over, read past routers; and the books, as `windrow check` reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import grpc
import psycopg

from bench.conservation import Kept
from bench.evidence import JobKey
from windrow.v1 import admin_pb2, admin_pb2_grpc

_CHECK_S_MAX = 120.0
_FETCHED = 20_000
_LEFT = """
SELECT uuid_send(id) FROM windrow.job
UNION ALL SELECT uuid_send(id) FROM windrow.dead
UNION ALL SELECT uuid_send(id) FROM windrow.departing
"""
_SUCCEEDED = "SELECT uuid_send(id) FROM windrow.finished WHERE state = 'succeeded'"


def read(dsns: Mapping[str, str], *, address: str) -> Kept:
    """Of all shards. Raises psycopg.Error and grpc.RpcError."""
    left: Counter[JobKey] = Counter()
    succeeded: Counter[JobKey] = Counter()
    for dsn in dsns.values():
        _count(dsn, _LEFT, left)
        _count(dsn, _SUCCEEDED, succeeded)
    return Kept(left=left, succeeded=succeeded, unbalanced=unbalanced(address, dsns))


def unbalanced(address: str, shards: Mapping[str, str]) -> list[str]:
    """Every org and shard whose books do not balance (I5), in words. Raises grpc.RpcError."""
    with grpc.insecure_channel(address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        return [
            f"org {books.org!r} on {shard!r}"
            for shard in shards
            for response in admin.CheckShard(
                admin_pb2.CheckShardRequest(shard=shard), timeout=_CHECK_S_MAX, wait_for_ready=True
            )
            for books in response.orgs
            if not books.balanced
        ]


def _count(dsn: str, statement: str, jobs: Counter[JobKey]) -> None:
    with psycopg.connect(dsn) as connection, connection.cursor("jobs", binary=True) as cursor:
        cursor.itersize = _FETCHED
        cursor.execute(statement.encode())
        for (job,) in cursor:
            jobs[job] += 1
