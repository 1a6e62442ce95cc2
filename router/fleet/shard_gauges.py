"""Writes one file of figures for each shard into the metrics' folder: how many jobs its queues have, its slots, and
signs that the shard needs an operator. The scrape endpoint adds these files to its answer (router/process/metrics.py).
A new file replaces the shard's old file, even if another router process wrote the old one, because all processes read
the same figures."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from shard import metrics
from shard.admin.queue_figures import QueueFigures, folded
from shard.attempts import attempt
from shard.health.signs import Signs
from shard.placement.catalog import Holding
from shard.vocabulary import ShardName

# The interval at which the figures are read, and how old the count of jobs may be at that time. If another router has
# made a count that is not older than this, its count is used, so that one count serves all routers.
_EVERY_S, _AGE_US_MAX = 60.0, 45_000_000
# How long figures are shown if no process replaces them.
_SHOWN_S = 180.0
_HOLDS_NOTHING = Holding()
# The labels of a series, and its value.
_Sample = tuple[tuple[str, ...], float]


async def record(fleet: Fleet, folder: Path, *, named_max: int) -> None:
    """Writes the files every minute, until cancelled. `named_max`: how many queues of a shard the figures name."""
    running: dict[ShardName, asyncio.Task[bool]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            holdings = fleet.holdings()
            # Leave out a shard whose last count has not ended, so that no other shard waits for it. If a shard does not
            # answer, its file stays as it is, and is soon too old to be read.
            for name, handle in fleet.shards().items():
                if handle.is_usable and (name not in running or running[name].done()):
                    act = partial(_write, folder, handle, holdings.get(name, _HOLDS_NOTHING), named_max=named_max)
                    running[name] = group.create_task(
                        attempt(f"write the figures of shard {name!r}", act, level=logging.DEBUG)
                    )
            await asyncio.sleep(_EVERY_S)


async def _write(folder: Path, handle: ShardHandle, held: Holding, *, named_max: int) -> None:
    rows = folded(await handle.queue_admin.queue_figures(max_age_us=_AGE_US_MAX), named_max=named_max)
    name, signs = handle.name, await handle.signs()
    families = [
        _family(metrics.QUEUE_JOBS, [sample for row in rows for sample in _jobs(name, row)]),
        _family(metrics.QUEUE_OLDEST_SECONDS, [(_names(name, row), row.oldest_ready_s or 0.0) for row in rows]),
        _family(metrics.SLOTS, [((name, "owned"), held.slots), ((name, "leaving"), held.leaving)]),
        *(_family(declared, [((name,), value)]) for declared, value in _of_signs(signs)),
    ]
    # The name of a shard may have characters that the name of a file must not have.
    file = folder / f"shard_{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}.json"
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({"until": time.time() + _SHOWN_S, "families": families}))
    new.replace(file)


def _family(declared: metrics.Declared, samples: Sequence[_Sample]) -> tuple[object, ...]:
    """Returns a family of samples in the form that router/process/metrics.py reads."""
    return declared.name, declared.meaning, declared.labels, samples


def _of_signs(signs: Signs) -> Iterator[tuple[metrics.Declared, float]]:
    yield metrics.SNAPSHOT_SECONDS, signs.snapshot_s
    yield metrics.SCHEDULE_LATE_SECONDS, signs.schedule_late_s
    yield metrics.ARCHIVE_LATE_SECONDS, signs.archive_late_s
    yield metrics.TRANSACTION_AGE, signs.transaction_age
    yield metrics.CONNECTIONS_USED, signs.connections_used
    yield metrics.PARTITIONS_MISSING, signs.partitions_missing


def _names(shard: ShardName, row: QueueFigures) -> tuple[str, ...]:
    return shard, row.org or "", row.queue or ""


def _jobs(shard: ShardName, row: QueueFigures) -> Iterator[_Sample]:
    for state in ("scheduled", "ready", "leased", "dead"):
        yield (*_names(shard, row), state), getattr(row, state)
