"""Starts and ends processes. Processes of this repository print `ready …` as soon as they serve, and end when their
standard input ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import IO

import psutil

_ROOT = Path(__file__).resolve().parent.parent
_END_S_MAX = 15.0
_FINISH_S_MAX = 60.0


class ProcessFailed(Exception):
    """A process did not start, or ended with a failure."""


async def start(
    module: str,
    *arguments: str,
    stdin: int = PIPE,
    stdout: int | IO[bytes] | None = PIPE,
    stderr: int | IO[bytes] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Process:
    """Starts a process that runs this module of the checkout. Without `environ`, the new process inherits the
    environment of this process."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=_ROOT,
        env=environ,
        # Ctrl-C must reach only this process, which then ends the new process in an orderly way.
        start_new_session=True,
    )


@contextlib.asynccontextmanager
async def serving(module: str, *arguments: str, order: str = "") -> AsyncGenerator[tuple[Process, str], None]:
    """Runs the module `module` in a process while the context is open. Yields the process, and what it printed after
    `ready`. Raises ProcessFailed. `order`: a line that the process gets on its input at its start."""
    process = await start(module, *arguments)
    try:
        assert process.stdin is not None
        if order:
            process.stdin.write(f"{order}\n".encode())
        assert process.stdout is not None
        word, _, rest = (await process.stdout.readline()).decode().strip().partition(" ")
        if word != "ready":
            raise ProcessFailed(f"{module} did not start")
        yield process, rest
    finally:
        await end(process)


async def finish(process: Process) -> None:
    """Lets a process finish its work and end. Raises ProcessFailed if the process ended with a failure."""
    if process.returncode is None:
        await end(process, seconds_max=_FINISH_S_MAX)
    if process.returncode != 0:
        raise ProcessFailed(f"process {process.pid} ended with exit code {process.returncode}; see above")


async def end(process: Process, *, seconds_max: float = _END_S_MAX) -> None:
    """Closes a process's input so that the process ends. Kills the process if it does not end."""
    assert process.stdin is not None
    process.stdin.close()
    await _ended(process, seconds_max)


async def terminate(process: Process, *, seconds_max: float) -> None:
    """Ends a process by SIGTERM, and kills it if it does not end."""
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
    """Returns a process, followed by all its descendants. The list is empty if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if pid is not None:
            first = psutil.Process(pid)
            return [first, *first.children(recursive=True)]
    return []


def runs(process: psutil.Process) -> bool:
    """Returns whether a process has not ended. A zombie has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    """Returns a loopback port at which nobody listens. Use it soon: another program may get it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
