"""Tests which slow servers the breaker of a shard treats as silent."""

from __future__ import annotations

import asyncio

import pytest

from proof.proxy import open_proxy_before, through
from shard.postgres.pool import Database
from tests.conftest import SHARD

PATIENCE_S = 20.0


@pytest.mark.xfail(strict=True, reason="a server that takes 0.8 s to let a new connection in is taken for silent")
async def test_statements_of_a_shard_that_is_far_away_are_let_be(module_dsn: str) -> None:
    async with open_proxy_before(module_dsn) as proxy:
        database = Database(SHARD, through(module_dsn, proxy))
        await database.open()
        await asyncio.wait_for(database._pool.connected(), 30)
        # The delay is added in each direction, so a round trip takes 0.22 s. With TLS, half of this delay would be
        # enough to show the problem.
        proxy.delay_s = 0.11
        try:
            sleeps = (database.run(b"SELECT pg_sleep(3)::text", {}) for _ in range(4))
            assert await asyncio.gather(*sleeps, return_exceptions=True) == [[("",)]] * 4
        finally:
            await database.close()
