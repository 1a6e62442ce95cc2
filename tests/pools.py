"""Pools of consumers of all orgs, for tests."""

from __future__ import annotations

from router.fleet.org_pools import OrgPools
from router.fleet.ready_orgs import ReadyOrgs
from router.fleet.starts import Starts
from shard.queue.store import Store


def no_pools(store: Store) -> tuple[OrgPools, ReadyOrgs]:
    """Returns the pools that a wait room needs if no consumer takes jobs of all orgs."""
    pools = OrgPools(dict, lambda _: (), Starts(lambda _: store, lambda: None))
    ready = ReadyOrgs(store, sweep_s=3600.0, on_ready=lambda _org, _queue: None)
    return pools, ready
