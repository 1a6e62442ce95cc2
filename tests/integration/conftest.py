"""Databases that record the statements that are sent to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.conftest import SHARD
from tests.recorder import Recorder


@pytest.fixture
async def fresh_recorder(fresh_dsn: str) -> AsyncGenerator[Recorder, None]:
    """A recorder on a database of its own."""
    opened = Recorder(SHARD, fresh_dsn)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def recorder(module_dsn: str) -> AsyncGenerator[Recorder, None]:
    opened = Recorder(SHARD, module_dsn)
    await opened.open()
    yield opened
    await opened.close()
