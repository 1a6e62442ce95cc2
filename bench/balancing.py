"""The balancer of a benchmark's cluster: `windrow balancer`, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from pathlib import Path

from bench.processes import terminate
from bench.system import Wrong

_END_S_MAX = 30.0


@contextlib.asynccontextmanager
async def balancing(config: Path) -> AsyncGenerator[Process, None]:
    """It runs for this scope, and follows the cluster file. Raises Wrong if it has ended by itself."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "balancer", "--config", str(config)),
        # Ctrl-C is for this process, which ends what it started in order.
        start_new_session=True,
    )
    try:
        yield process
        if process.returncode is not None:
            raise Wrong(f"the balancer ended by itself, with exit code {process.returncode}; see above")
    finally:
        await terminate(process, seconds_max=_END_S_MAX)
