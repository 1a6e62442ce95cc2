"""The orders that a client process gets on standard input: one JSON object at its start, then one word per line.

`calm`: behave well from now on. `probe`: producers enqueue one job for every org. The end of the input means: finish
and exit.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from proof.history import Recorder

# Every client uses this queue.
QUEUE = "load"
# A line may be long, because a site may name thousands of orgs.
_LINE_BYTES_MAX = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a client process must know. `name` and `generation` are part of the seed of the random choices of the
    process. The process that replaces a killed one has another generation, so it makes other choices."""

    address: str
    folder: str
    name: str
    generation: int
    seed: int
    orgs: Sequence[str]
    # The number of this client among the clients of the same kind, and the number of these clients.
    mine: int
    places: int
    window_s: float
    # How many jobs this client enqueues per second, if its load is planned.
    per_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def luck(self, what: str = "") -> random.Random:
        return random.Random(f"{self.seed}/{self.name}/{self.generation}/{what}")

    def recorder(self) -> Recorder:
        return Recorder(Path(self.folder), f"{self.name}.{self.generation}")


class Orders:
    """The commands that the process has got since its start."""

    def __init__(self) -> None:
        self.calm = asyncio.Event()
        self.probe = asyncio.Event()
        self.over = asyncio.Event()

    async def follow(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            match line.decode().strip():
                case "calm":
                    self.calm.set()
                case "probe":
                    self.probe.set()
                case word:
                    raise ValueError(f"there is no order {word!r}")
        self.over.set()

    async def pause(self, seconds: float) -> None:
        """Sleeps for this time, or until the run ends."""
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            pass


def main(work: Callable[[Site, Orders], Awaitable[None]]) -> None:
    """Runs a client until its standard input ends. The input also ends when the process that started the client
    dies."""
    # Ctrl-C in a terminal reaches the whole process group. Ignore it, because the process that started this client ends
    # the client in an orderly way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main(work))


async def _main(work: Callable[[Site, Orders], Awaitable[None]]) -> None:
    lines = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    site = Site(**json.loads(await lines.readline()))
    orders = Orders()
    following = asyncio.create_task(orders.follow(lines))
    working = asyncio.ensure_future(work(site, orders))
    os.write(1, b"ready\n")
    try:
        await asyncio.wait({following, working}, return_when=asyncio.FIRST_COMPLETED)
        await working
    finally:
        following.cancel()
