"""Work that runs while the code of a scope runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def background(*works: Coroutine[Any, Any, None]) -> AsyncGenerator[None, None]:
    """Runs these coroutines until the end of the scope. Raises the error of a coroutine that has failed, unless the
    code of the scope has raised an error itself."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
