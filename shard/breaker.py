"""Whether a shard's server answers: a circuit breaker that asks for itself. Knows no pool, and no statement.

    closed ──doubt──▶ closed, and asking ──silence──▶ open ──a probe is answered──▶ closed
                              └──any answer──▶ closed

A statement may take long for good reasons, so its taking long is a reason to ask, and no more. While the breaker is
open, callers are refused at once, and nothing but probes reaches the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable

from shard.errors import what
from shard.vocabulary import ShardName

_log = logging.getLogger(__name__)

# A statement that takes longer raises a doubt.
OVERDUE_S = 0.4
# How long a server that is in doubt may say nothing at all.
_SILENCE_S = 0.8
# Between two questions to a server that answers, and whose statements go on taking long.
_AGAIN_S = 1.0
# A probe that has not been answered for so long gets another beside it: the first may have been lost on the way.
_PROBE_S = 0.8
_PROBES_MAX = 4
_PROBE_S_MAX = 5.0
# After a probe that was refused, at most.
_PAUSE_S = 0.5

_SILENT = "it does not answer"


class Breaker:
    """`ask` returns once the server has answered something small, and raises when it is refused. `opened` is called
    each time that the breaker opens."""

    def __init__(self, shard: ShardName, *, ask: Callable[[], Awaitable[None]], opened: Callable[[], None]) -> None:
        # Why the server is taken to be away. None: it is not, the breaker is closed.
        self.trouble: str | None = None
        # How many statements were answered, which is for their runner to count: one more settles a doubt.
        self.answers = 0
        self._shard = shard
        self._ask = ask
        self._opened = opened
        self._closed = asyncio.Event()
        self._closed.set()
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = -math.inf
        self._probing: asyncio.Task[None] | None = None
        self._ended = False

    def doubt(self) -> None:
        """Something speaks for the server's being away: has it asked."""
        now_s = asyncio.get_running_loop().time()
        if self.trouble is None and not self._ended and now_s - self._asked_s > _SILENCE_S + _AGAIN_S:
            self._asked_s = now_s
            self._asking = asyncio.create_task(self._find_out())

    def open(self, why: str) -> None:
        """The server is away, until a probe is answered."""
        if self.trouble is None and not self._ended:
            self.trouble = why
            _log.warning("%s is unavailable: %s", what(self._shard), why)
            self._closed.clear()
            self._probing = asyncio.create_task(self._probe())
            self._opened()

    async def until_closed(self) -> None:
        """At once where it is closed, and when it has ended."""
        await self._closed.wait()

    async def end(self) -> None:
        """Asks no more."""
        self._ended = True
        self._closed.set()
        tasks = [task for task in (self._asking, self._probing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _find_out(self) -> None:
        answers = self.answers
        question = asyncio.create_task(self._ask_in_time())
        try:
            # Twice: where it was this process that stood still, the first time is over before it has heard anything.
            for _ in range(2):
                await asyncio.wait({question}, timeout=_SILENCE_S / 2)
            # Also a refusal is an answer: what it means for new connections, those who make them find out.
            if not question.done() and self.answers == answers:
                self.open(_SILENT)
        finally:
            await _cancel({question})

    async def _probe(self) -> None:
        probes: set[asyncio.Task[str | None]] = set()
        try:
            # Who opened the breaker has just been refused, or has waited long enough.
            await asyncio.sleep(_PAUSE_S / 2)
            while True:
                if len(probes) < _PROBES_MAX:
                    probes.add(asyncio.create_task(self._ask_in_time()))
                ended, probes = await asyncio.wait(probes, timeout=_PROBE_S, return_when=asyncio.FIRST_COMPLETED)
                troubles = {probe.result() for probe in ended}
                if None in troubles:
                    break
                for trouble in troubles:
                    self.trouble = trouble
                    await asyncio.sleep(_PAUSE_S * random.uniform(0.5, 1.0))
        finally:
            await _cancel(probes)
        self.trouble = None
        self._closed.set()
        _log.info("%s is available again", what(self._shard))

    async def _ask_in_time(self) -> str | None:
        """What keeps the server from answering; None: it has answered."""
        try:
            async with asyncio.timeout(_PROBE_S_MAX):
                await self._ask()
        except TimeoutError:
            return _SILENT
        except Exception as error:  # noqa: BLE001 - whatever keeps it from answering
            return first_line(error)
        return None


async def _cancel(tasks: set[asyncio.Task[str | None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
