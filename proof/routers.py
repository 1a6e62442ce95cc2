"""Router processes under their supervisor, which runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from router.process.supervisor import Supervisor


@contextlib.asynccontextmanager
async def running(routers: Supervisor) -> AsyncGenerator[str, None]:
    """Runs routers for this scope, and yields their address."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    running = asyncio.create_task(routers.run(ready=ready.set_result, stop=stop))
    try:
        starts: set[asyncio.Future[str] | asyncio.Future[None]] = {running, ready}
        await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        yield await ready
    finally:
        stop.set()
        await running
