"""A client, and the fake router that it talks to."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.client_fake import FakeRouter, fake_router
from windrow import Client


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with fake_router() as running:
        yield running


@pytest.fixture
async def client(router: FakeRouter) -> AsyncIterator[Client]:
    async with Client(router.address, org="acme") as made:
        yield made
