"""A router's copy of the catalog. The tasks that wait for a change are told of the change even if something else
fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.fleet.catalog_copy import CatalogCopy
from shard.admin import limits, weights
from shard.admin.weights import Weights
from shard.errors import ShardUnavailable
from shard.limits import LimitTable
from shard.placement import catalog
from shard.placement.catalog import Catalog, Look
from shard.placement.slots import SLOTS, Placement
from shard.vocabulary import CATALOG, ShardName

S1, S2 = ShardName("s1"), ShardName("s2")
BEFORE = Catalog(epoch=1, slots=(Placement(writes=(S1,), reads=(S1,), epoch=1),) * SLOTS, pins={})
AFTER = replace(BEFORE, epoch=2, slots=(Placement(writes=(S2,), reads=(S1, S2), epoch=2), *BEFORE.slots[1:]))


async def test_a_change_of_placement_is_told_once_although_the_limits_cannot_be_read_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[Catalog, Catalog]] = []
    tables: list[LimitTable | ShardUnavailable] = [
        LimitTable(version=1),
        ShardUnavailable(CATALOG, "gone"),
        LimitTable(version=2),
    ]
    in_force: list[int] = []

    async def look(_database: object, known: Catalog) -> Look:
        return Look(known if known is AFTER else AFTER, {}, 0, 2, 0)

    async def read_limits(*_: object) -> LimitTable:
        table = tables.pop(0)
        if isinstance(table, ShardUnavailable):
            raise table
        return table

    async def read_weights(_: object) -> Weights:
        return Weights(0, {})

    monkeypatch.setattr(catalog, "look", look)
    monkeypatch.setattr(limits, "read", read_limits)
    monkeypatch.setattr(weights, "read", read_weights)
    copy = CatalogCopy(
        "host=127.0.0.1",
        lambda old, new: told.append((old, new)),
        lambda _: None,
        lambda table: in_force.append(table.version),
        lambda _: None,
    )
    await copy.begin(BEFORE)
    with pytest.raises(ShardUnavailable):
        await copy.look()
    assert told == [(BEFORE, AFTER)]
    await copy.look()
    assert told == [(BEFORE, AFTER)]
    assert in_force == [1, 2]
