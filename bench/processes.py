"""Server processes of the benchmark's own: each says `ready …` when it serves, and ends with its input."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator

import psutil

from bench.system import Wrong

_END_S_MAX = 15.0
_FINISH_S_MAX = 60.0


@contextlib.asynccontextmanager
async def serving(module: str, *arguments: str) -> AsyncGenerator[tuple[Process, str], None]:
    """A process that runs this module for the scope, and what it said after `ready`. Raises Wrong."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        # Ctrl-C is for this process, which ends what it started in order.
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        word, _, rest = (await process.stdout.readline()).decode().strip().partition(" ")
        if word != "ready":
            raise Wrong(f"{module} did not start")
        yield process, rest
    finally:
        await end(process)


async def finish(process: Process) -> None:
    """Lets a process do to its end what it has begun. Raises Wrong unless all went well with it."""
    if process.returncode is None:
        await end(process, seconds_max=_FINISH_S_MAX)
    if process.returncode != 0:
        raise Wrong(f"process {process.pid} ended with exit code {process.returncode}; see above")


async def end(process: Process, *, seconds_max: float = _END_S_MAX) -> None:
    """Ends a process that ends with its input; kills it where it does not."""
    assert process.stdin is not None
    process.stdin.close()
    await _ended(process, seconds_max)


async def terminate(process: Process, *, seconds_max: float) -> None:
    """Ends a process that ends with SIGTERM; kills it where it does not."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    await _ended(process, seconds_max)


async def _ended(process: Process, seconds_max: float) -> None:
    try:
        async with asyncio.timeout(seconds_max):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def family(pid: int | None) -> list[psutil.Process]:
    """A process, then all that it has started; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if pid is not None:
            first = psutil.Process(pid)
            return [first, *first.children(recursive=True)]
    return []
