"""The balancers of a run: `windrow balancer` processes, started again when they end, as whoever runs services does."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import IO

from bench.processes import terminate

_AGAIN_S = 1.0
_END_S_MAX = 20.0
_ROOT = Path(__file__).resolve().parent.parent


class Balancers:
    """Each is known by a name, whichever process that is now."""

    def __init__(self, names: Sequence[str], *, config: Path, folder: Path) -> None:
        self.names = names
        self._config = config
        self._folder = folder
        self._running: dict[str, Process] = {}

    def pid(self, name: str) -> int | None:
        """None while it is being started again."""
        process = self._running.get(name)
        return None if process is None or process.returncode is not None else process.pid

    @property
    def pids(self) -> list[int]:
        return [pid for name in self.names if (pid := self.pid(name)) is not None]

    async def keep(self, name: str) -> None:
        """Until cancelled; then lets the process end, and kills one that does not."""
        with (self._folder / f"{name}.log").open("ab") as log:
            while True:
                process = self._running[name] = await self._start(log)
                try:
                    code = await process.wait()
                finally:
                    if process.returncode is None:
                        await terminate(process, seconds_max=_END_S_MAX)
                log.write(f"ended with {code}; starting another\n".encode())
                log.flush()
                await asyncio.sleep(_AGAIN_S)

    async def _start(self, log: IO[bytes]) -> Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli.main", "balancer", "--config", str(self._config)),
            stdin=DEVNULL,
            stdout=log,
            stderr=log,
            cwd=_ROOT,
            # Ctrl-C is for us; we end them in order.
            start_new_session=True,
        )


@contextlib.asynccontextmanager
async def open_balancers(names: Sequence[str], *, config: Path, folder: Path) -> AsyncGenerator[Balancers, None]:
    balancers = Balancers(names, config=config, folder=folder)
    keeping = [asyncio.create_task(balancers.keep(name)) for name in names]
    try:
        yield balancers
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
