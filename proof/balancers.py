"""Runs `windrow balancer` processes with a cluster file, and restarts each process when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import IO

from proof.background import background
from proof.processes import ProcessFailed, start, terminate

_AGAIN_S = 1.0
_END_S_MAX = 30.0


class Balancers:
    """Balancers. Each has a name, which its next process keeps if the process is replaced. `environ` is added to the
    environment of the processes."""

    def __init__(self, names: Sequence[str], *, config: Path, folder: Path, environ: Mapping[str, str]) -> None:
        self.names = names
        self._config = config
        self._folder = folder
        self._environ = dict(os.environ) | dict(environ)
        self._running: dict[str, Process] = {}

    def pid(self, name: str) -> int | None:
        """Returns the balancer's process id; None while it is being restarted."""
        process = self._running.get(name)
        return None if process is None or process.returncode is not None else process.pid

    @property
    def pids(self) -> list[int]:
        return [pid for name in self.names if (pid := self.pid(name)) is not None]

    async def keep(self, name: str) -> None:
        """Keeps a balancer running until this coroutine is cancelled. Then ends the process, and kills it if it does
        not end."""
        with (self._folder / f"{name}.log").open("ab") as log:
            while True:
                process = self._running[name] = await _start(self._config, log, self._environ)
                try:
                    code = await process.wait()
                finally:
                    if process.returncode is None:
                        await terminate(process, seconds_max=_END_S_MAX)
                log.write(f"ended with {code}; starting another\n".encode())
                log.flush()
                await asyncio.sleep(_AGAIN_S)


@contextlib.asynccontextmanager
async def open_balancers(
    names: Sequence[str], *, config: Path, folder: Path, environ: Mapping[str, str]
) -> AsyncGenerator[Balancers, None]:
    balancers = Balancers(names, config=config, folder=folder, environ=environ)
    async with background(*(balancers.keep(name) for name in names)):
        yield balancers


@contextlib.asynccontextmanager
async def open_balancer(config: Path) -> AsyncGenerator[Process, None]:
    """Runs one balancer for this scope. Raises ProcessFailed if the balancer has ended by itself."""
    process = await _start(config, None)
    try:
        yield process
        if process.returncode is not None:
            raise ProcessFailed(f"the balancer ended by itself, with exit code {process.returncode}; see above")
    finally:
        await terminate(process, seconds_max=_END_S_MAX)


async def _start(config: Path, log: IO[bytes] | None, environ: Mapping[str, str] | None = None) -> Process:
    command = ("cli.main", "balancer", "--config", str(config))
    return await start(*command, stdin=DEVNULL, stdout=log, stderr=log, environ=environ)
