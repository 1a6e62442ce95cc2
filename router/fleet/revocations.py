"""The consumers of this router that are told when somebody else ends their leases: see shard/queue/revocation.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.codec import convert
from shard.job_id import from_hex
from shard.lease_token import token, token_prefix
from shard.queue.revocation import Revocation
from shard.vocabulary import OrgId, ShardName
from windrow.v1 import queue_pb2

Told = Callable[[bytes], None]


class Revocations:
    """Tells consumers which leases somebody else has ended. A lease names no stream. So every stream with the name of
    the lease's worker is told, if it is a stream of the lease's org or of all orgs. The consumer knows which leases it
    has."""

    def __init__(self) -> None:
        self._consumers: dict[tuple[OrgId | None, str], dict[Told, None]] = {}

    def join(self, org: OrgId | None, worker: str, told: Told) -> None:
        """Calls `told` with encoded ConsumeResponses until `leave`. `org` is None for a consumer of all orgs."""
        self._consumers.setdefault((org, worker), {})[told] = None

    def leave(self, org: OrgId | None, worker: str, told: Told) -> None:
        consumers = self._consumers.get((org, worker), {})
        consumers.pop(told, None)
        if not consumers:
            self._consumers.pop((org, worker), None)

    def tell(self, shard: ShardName, revocations: Iterable[Revocation]) -> None:
        """Tells the consumers of this router about leases of this shard. A message to many streams is encoded once."""
        for revocation in revocations:
            for org in (revocation.org, None):
                consumers = self._consumers.get((org, revocation.worker))
                if consumers:
                    encoded = _encoded(shard, revocation, names_org=org is None)
                    for told in list(consumers):
                        told(encoded)


def _encoded(shard: ShardName, revocation: Revocation, *, names_org: bool) -> bytes:
    answer = convert.ANSWERS[revocation.answer]
    message = queue_pb2.ConsumeResponse()
    for lease in revocation.leases:
        prefix = token_prefix(shard, lease.number, names_org=names_org)
        revoked = token(prefix, from_hex(lease.job_hex), revocation.org if names_org else None)
        message.revoked.add(lease=revoked, answer=answer)
    return message.SerializeToString()
