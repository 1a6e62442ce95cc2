"""What the breaker takes for silence, and what it leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from shard.database import Database
from tests.conftest import SHARD
from tests.fault.proxy import open_proxy_before, through

PATIENCE_S = 20.0


@pytest.mark.xfail(strict=True, reason="a server that takes 0.8 s to let a new connection in is taken for silent")
async def test_statements_of_a_shard_that_is_far_away_are_let_be(module_dsn: str) -> None:
    async with open_proxy_before(module_dsn) as proxy:
        database = Database(SHARD, through(module_dsn, proxy))
        await database.open()
        await database._pool.wait(timeout=30)
        # There and back: 0.22 s. With TLS, half of it will do.
        proxy.delay_s = 0.11
        try:
            sleeps = (database.run(b"SELECT pg_sleep(3)::text", {}) for _ in range(4))
            assert await asyncio.gather(*sleeps, return_exceptions=True) == [[("",)]] * 4
        finally:
            await database.close()
