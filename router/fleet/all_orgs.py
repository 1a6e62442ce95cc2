"""What one shard of this process needs to know about the consumers that take jobs of all orgs, and about the watchers
of all orgs (router/fleet/org_pools.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from router.fleet.shares import Share
from shard.queue.store import Store
from shard.vocabulary import OrgId, QueueName, ShardName


class AllOrgs(Protocol):
    """The consumers and watchers of all orgs, as a shard sees them."""

    @property
    def any(self) -> bool:
        """Whether anybody takes jobs of all orgs."""
        ...

    @property
    def queues(self) -> Collection[QueueName]:
        """The queues that are taken or watched for all orgs."""
        ...

    def serves(self, queue: QueueName) -> bool:
        """Returns whether somebody takes or watches this queue for all orgs."""
        ...

    def found(self, shard: ShardName, org: OrgId, queue: QueueName) -> None:
        """Call this when the org may have ready jobs in this queue of the shard."""
        ...

    def room(self, queue: QueueName, jobs: int) -> int:
        """Returns for how many jobs of this queue the consumers have room. May stop counting at `jobs`."""
        ...

    def deal(self, org: OrgId, queue: QueueName, sizes: Sequence[int]) -> list[Share]:
        """Keeps places at consumers for new jobs with payloads of these sizes."""
        ...

    def lost(self, shard: ShardName) -> None:
        """Call this when the shard is not used any more, or does not answer."""
        ...

    def note(self, store: Store) -> None:
        """Records on the shard of `store` that the consumers of all orgs were seen."""
        ...
