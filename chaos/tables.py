"""What the shards' tables say when all is over, read past routers; and the books, as `windrow check` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import grpc

from chaos.checker.evidence import OrgBooks, Past, Row, State
from chaos.shards import Shard, ask
from windrow.v1 import admin_pb2, admin_pb2_grpc

_CHECK_S_MAX = 60.0
_COLUMNS = (
    "j.id::text, q.org, q.queue, j.dedup_key, j.lease, (extract(epoch FROM j.leased_at) * 1000000)::bigint, j.history"
)
_ROWS = f"""
SELECT {_COLUMNS}, 'live' FROM windrow.job j JOIN windrow.queue q USING (queue_id)
UNION ALL SELECT {_COLUMNS}, 'dead' FROM windrow.dead j JOIN windrow.queue q USING (queue_id)
UNION ALL SELECT {_COLUMNS}, j.state FROM windrow.finished j JOIN windrow.queue q USING (queue_id)
"""


def live_jobs(shards: Iterable[Shard]) -> int:
    return sum(int(ask(shard.direct_dsn, "SELECT count(*) FROM windrow.job")[0][0]) for shard in shards)


def read_rows(shards: Iterable[Shard]) -> list[Row]:
    return [row for shard in shards for row in _rows(shard)]


def _rows(shard: Shard) -> Iterator[Row]:
    for job, org, queue, key, lease, leased_at_us, history, state in ask(shard.direct_dsn, _ROWS):
        entries = json.loads(history) if isinstance(history, str) else history
        yield Row(
            job=job,
            org=org,
            queue=queue,
            shard=shard.name,
            state=State(state),
            key=key or "",
            lease=lease,
            leased_at_us=leased_at_us,
            past=[
                Past(
                    lease=int(entry["lease"]),
                    outcome=entry["outcome"],
                    leased_at_us=entry["leased_at_us"],
                    ended_at_us=entry["ended_at_us"],
                )
                for entry in entries or ()
            ],
        )


def read_books(address: str, shards: Iterable[str]) -> list[OrgBooks]:
    """Raises grpc.RpcError."""
    with grpc.insecure_channel(address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        return [
            OrgBooks(shard=shard, org=one.org, accepted=one.accepted, balanced=one.balanced)
            for shard in shards
            for part in admin.CheckShard(
                admin_pb2.CheckShardRequest(shard=shard), timeout=_CHECK_S_MAX, wait_for_ready=True
            )
            for one in part.orgs
        ]
