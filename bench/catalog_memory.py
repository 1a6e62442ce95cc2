"""Measures what one router process remembers of a large cluster. First, its copy of the catalog: how much memory the
copy takes, and how long it takes to find where an org lives, for several numbers of pinned orgs. The copy contains no
orgs that are not pinned. Second, the memory for the ids of the queues that the process has met. Starts nothing.

    .venv/bin/python -m bench.catalog_memory
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc

from proof.arguments import number
from proof.table import Table
from shard.placement.catalog import Catalog
from shard.placement.slots import SLOTS, Placement, plan
from shard.postgres.pool import Database
from shard.queue.queue_ids import QueueIds
from shard.vocabulary import OrgId, QueueId, QueueName, ShardName, Slot

_LOOKUPS = 200_000
_QUEUES = 100_000
_SEED = 20_240_229


def catalog(shards: int, pins: int) -> Catalog:
    """Returns a catalog as a router reads it: each slot has an object of its own, with its own copies of the names."""
    names = [ShardName(f"shard-{at:04}") for at in range(shards)]
    owners = plan([None] * SLOTS, dict.fromkeys(names, 1.0))
    owners += [names[at % shards] for at in range(pins)]
    placements: list[Placement] = []
    for owner in owners:
        own = (ShardName(f"{owner} "[:-1]),)
        placements.append(Placement(writes=own, reads=own, epoch=1))
    pinned = {OrgId(f"org-{at:08}"): Slot(SLOTS + at) for at in range(pins)}
    return Catalog(epoch=1, slots=tuple(placements), pins=pinned)


def measure(shards: int, pins: int, orgs: int) -> tuple[float, float]:
    """Returns the size of a copy of the catalog in MiB, and the time of one look-up among `orgs` orgs in µs."""
    gc.collect()
    tracemalloc.start()
    made = catalog(shards, pins)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    luck = random.Random(_SEED)
    asked = [OrgId(f"org-{luck.randrange(orgs):08}") for _ in range(_LOOKUPS)]
    began_s = time.perf_counter()
    for org in asked:
        made.placement(org)
    return size / 2**20, (time.perf_counter() - began_s) / _LOOKUPS * 1e6


def bytes_of_a_queue() -> float:
    """Returns the bytes that a process keeps for a queue that a doorbell or a walk has named."""
    gc.collect()
    tracemalloc.start()
    ids = QueueIds(Database(ShardName("s1"), "", connections=1))
    for at in range(_QUEUES):
        ids.remember(QueueId((1 << 32) + at), OrgId(f"org-{at:08}"), QueueName("mail"))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / _QUEUES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.catalog_memory", description=__doc__)
    parser.add_argument("--shards", type=number(SLOTS), default=1000)
    parser.add_argument("--orgs", type=number(100_000_000), default=10_000_000)
    parser.add_argument("--pins", type=number(10_000_000, 0), nargs="+", default=[0, 1000, 100_000, 1_000_000])
    options = parser.parse_args()
    rows: list[list[str]] = []
    for pins in options.pins:
        size, took_us = measure(options.shards, pins, options.orgs)
        rows.append([f"{pins:,}", f"{size:.1f}", f"{took_us:.2f}"])
    title = f"A copy of the catalog: {options.shards:,} shards, look-ups among {options.orgs:,} orgs"
    print(Table(title=title, head=["pinned orgs", "MiB", "µs a look-up"], rows=rows).markdown())
    print(f"A queue that the process remembers: {bytes_of_a_queue():.0f} bytes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
