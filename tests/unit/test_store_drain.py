"""When a store is closed, it first finishes the calls that it has accepted."""

from __future__ import annotations

from typing import Any

import pytest

from shard.postgres.pool import Database
from shard.queue.coalescer import Coalescer
from shard.queue.store import Store
from shard.vocabulary import ShardName


async def test_a_store_that_ends_waits_for_the_calls_of_every_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Coalescer[Any, Any]] = []
    finished: list[Coalescer[Any, Any]] = []
    make = Coalescer.__init__

    def record_made(self: Coalescer[Any, Any], *arguments: Any, **options: Any) -> None:
        made.append(self)
        make(self, *arguments, **options)

    async def record_finished(self: Coalescer[Any, Any]) -> None:
        finished.append(self)

    monkeypatch.setattr(Coalescer, "__init__", record_made)
    monkeypatch.setattr(Coalescer, "finish", record_finished)
    store = Store(Database(ShardName("s1"), "host=db1", connections=1))
    await store.finish()
    assert made
    assert finished == made
