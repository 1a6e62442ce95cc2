"""Records whether this router process can use the shards and the catalog."""

from __future__ import annotations

import asyncio
import math

from router.fleet.fleet import Fleet
from shard import metrics
from shard.placement.cluster_file import ShardState
from shard.vocabulary import ShardName

_EVERY_S = 1.0


async def record(fleet: Fleet) -> None:
    """Sets the metrics of the shards and the catalog every second, until cancelled."""
    recorded: set[ShardName] = set()
    while True:
        metrics.CATALOG_UP.set(fleet.has_fresh_catalog)
        usable = {
            name: handle.is_usable
            for name, handle in fleet.shards().items()
            if handle.entry.state is not ShardState.OFF
        }
        for name, is_usable in usable.items():
            metrics.SHARD_UP.labels(name).set(is_usable)
        for name in recorded - usable.keys():
            # A series cannot be removed from the files of several processes: NaN says that it has no value any more.
            metrics.SHARD_UP.labels(name).set(math.nan)
            metrics.QUARANTINED_KINDS.labels(name).set(math.nan)
        recorded |= usable.keys()
        await asyncio.sleep(_EVERY_S)
