"""A circuit breaker for one shard. The breaker notices that the shard's server is silent, and then asks the server
until it answers again. The breaker knows nothing about pools and statements.

    closed ──doubt──▶ closed, asking ──silence──▶ open ──a probe is answered──▶ closed
                           └──any answer──▶ closed

A statement may take long for good reasons. A slow statement therefore only makes the breaker ask the server. While the
breaker is open, callers are refused at once, and only probes are sent to the server.
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

# If a statement takes longer than this, the breaker asks the server whether it still answers.
OVERDUE_S = 0.4
# The breaker opens if a server in doubt answers nothing at all for this long.
_SILENCE_S = 0.8
# Each time that the breaker opens after a silence, it doubles this time, up to _SILENCE_S_MAX. After the breaker has
# stayed closed for _CALM_S, the time is _SILENCE_S again. The reason: a server that is silent again and again is busy
# but works, and each opening closes all connections to this server.
_SILENCE_S_MAX = 6.4
_CALM_S = 60.0
# The pause between two questions to a server that answers, but whose statements are still slow.
_AGAIN_S = 1.0
# After this time without an answer, another probe is sent in addition to the first probe, which may have been lost.
# While the server stays silent, the pause doubles, up to _PROBE_PAUSE_S_MAX. The reason: a server that is too busy to
# accept connections handles all of them later, even connections whose client has given up. So frequent probes would
# keep the server busy.
_PROBE_PAUSE_S = 0.8
_PROBE_PAUSE_S_MAX = 3.2
_PROBES_MAX = 4
_PROBE_S_MAX = 5.0
# The longest pause after a probe that was refused.
_REFUSED_PAUSE_S = 0.5

_SILENT = "it does not answer"


class Breaker:
    """`ask` sends the server a small statement and returns when the server has answered, or raises an error if the
    connection is refused. `opened` is called each time that the breaker opens. With a `patience` of 2, a server may be
    silent for twice as long before the breaker opens."""

    def __init__(
        self, shard: ShardName, *, ask: Callable[[], Awaitable[None]], opened: Callable[[], None], patience: float = 1.0
    ) -> None:
        # Why the breaker is open. None: it is closed.
        self.trouble: str | None = None
        # How many statements the server has answered. The owner of the breaker counts them here. If this number rises
        # while the breaker doubts the server, the doubt ends.
        self.answers = 0
        self._shard = shard
        self._ask = ask
        self._opened = opened
        self._closed = asyncio.Event()
        self._closed.set()
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = -math.inf
        self._patience = patience
        self._silence_s = patience * _SILENCE_S
        self._closed_s = -math.inf
        self._probing: asyncio.Task[None] | None = None
        self._ended = False

    def doubt(self) -> None:
        """Asks whether the server still answers, unless it was asked a moment ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._closed_s > _CALM_S:
            self._silence_s = self._patience * _SILENCE_S
        if self.trouble is None and not self._ended and now_s - self._asked_s > self._silence_s + _AGAIN_S:
            self._asked_s = now_s
            self._asking = asyncio.create_task(self._find_out())

    def open(self, why: str) -> None:
        """Opens the breaker, until a probe is answered. `why` is the reason that refused callers get."""
        if self.trouble is None and not self._ended:
            self.trouble = why
            _log.warning("%s is unavailable: %s", what(self._shard), why)
            self._closed.clear()
            self._probing = asyncio.create_task(self._probe())
            self._opened()

    async def until_closed(self) -> None:
        """Waits until the breaker is closed or has ended."""
        await self._closed.wait()

    async def end(self) -> None:
        """Stops asking and probing."""
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
            # Wait twice, because after this process was suspended the first wait may end before an answer could be
            # read.
            for _ in range(2):
                await asyncio.wait({question}, timeout=self._silence_s / 2)
            # A refused connection counts as an answer; the code that makes new connections handles the refusal.
            if not question.done() and self.answers == answers:
                self.open(_SILENT)
                self._silence_s = min(2 * self._silence_s, _SILENCE_S_MAX)
        finally:
            await _cancel({question})

    async def _probe(self) -> None:
        probes: set[asyncio.Task[str | None]] = set()
        pause_s = _PROBE_PAUSE_S
        try:
            # Pause first, because the server has just refused a connection, or has not answered for a long time.
            await asyncio.sleep(_REFUSED_PAUSE_S / 2)
            while True:
                if len(probes) < _PROBES_MAX:
                    probes.add(asyncio.create_task(self._ask_in_time()))
                heard = await _heard(probes, within_s=pause_s * random.uniform(0.75, 1.0))
                if None in heard:
                    break
                if heard:
                    self.trouble = heard.pop()
                    pause_s = _PROBE_PAUSE_S
                    await asyncio.sleep(_REFUSED_PAUSE_S * random.uniform(0.5, 1.0))
                else:
                    self.trouble = _SILENT
                    pause_s = min(2 * pause_s, _PROBE_PAUSE_S_MAX)
        finally:
            await _cancel(probes)
        self.trouble = None
        self._asked_s = -math.inf
        self._closed_s = asyncio.get_running_loop().time()
        self._closed.set()
        _log.info("%s is available again", what(self._shard))

    async def _ask_in_time(self) -> str | None:
        """Asks the server. Returns None if the server answered, and otherwise the reason why it did not."""
        try:
            async with asyncio.timeout(_PROBE_S_MAX):
                await self._ask()
        except TimeoutError:
            return _SILENT
        except Exception as error:  # noqa: BLE001 - any error means that the server is unavailable
            return first_line(error)
        return None


async def _heard(probes: set[asyncio.Task[str | None]], *, within_s: float) -> set[str | None]:
    """Waits until the server answers or refuses a probe. The returned set contains None if the server answered, and the
    reason if the server refused. The set is empty if the server stays silent. Removes the probes that have ended from
    `probes`."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while probes and loop.time() < end_s:
        ended, _ = await asyncio.wait(probes, timeout=end_s - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        probes -= ended
        if heard := {probe.result() for probe in ended} - {_SILENT}:
            return heard
    await asyncio.sleep(end_s - loop.time())
    return set()


async def _cancel(tasks: set[asyncio.Task[str | None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
