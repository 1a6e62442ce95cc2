"""The memory that calls and streams may take in this process: requests that are being served, answers that have not
been sent, jobs that wait to be read. It is reserved before the work is done, and held until the last byte is written or
the peer is gone (I9).

No org and no connection may hold more than is left free: one that is alone has half, and as much is free for others
(shard/places.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from router.status import RouterFull
from shard.places import Places

# How long a call waits for memory before it is refused.
WAIT_S_MAX = 5.0
# Accounts that are asked, each time that memory comes free, whether they fit in now.
_LOOKS_MAX = 16


class Buffer:
    """So many bytes, which orgs and connections share."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.orgs = Places(bytes_max)
        self.peers = Places(bytes_max)
        # Who waits for memory, by org; the org that was served last comes last.
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()

    @property
    def held(self) -> int:
        return self.orgs.taken

    def waits(self, org: str) -> bool:
        """Whether calls of the org wait for memory already."""
        return org in self._lines

    async def wait(self, account: Account, count: int, wait_s: float | None) -> None:
        """Returns once the account has so many bytes more. Raises RouterFull."""
        waiting = _Waiting(account, count, asyncio.get_running_loop().create_future())
        line = self._lines.setdefault(account.org, deque())
        line.append(waiting)
        try:
            async with asyncio.timeout(wait_s):
                await waiting.granted
        except BaseException as error:
            if waiting in line:
                line.remove(waiting)
                if not line and self._lines.get(account.org) is line:
                    del self._lines[account.org]
            elif not waiting.granted.cancelled():
                # It was granted at the very moment in which the wait ended.
                account.give_back(count)
            if isinstance(error, TimeoutError):
                raise RouterFull("bytes in calls and answers", self.bytes_max) from None
            raise

    def freed(self) -> None:
        """Some memory has come free: whoever waits and fits in now has it."""
        for _ in range(min(len(self._lines), _LOOKS_MAX)):
            org, line = next(iter(self._lines.items()))
            self._lines.move_to_end(org)
            while line:
                first = line[0]
                # Whoever was cancelled takes itself out later.
                left = first.granted.done()
                if not left and not first.account.take(first.count):
                    break
                line.popleft()
                if not left:
                    first.granted.set_result(None)
            if not line:
                del self._lines[org]


class _Waiting:
    __slots__ = ("account", "count", "granted")

    def __init__(self, account: Account, count: int, granted: asyncio.Future[None]) -> None:
        self.account = account
        self.count = count
        self.granted = granted


class Account:
    """What one call or stream holds of the buffer, until it is closed. What is asked of it afterwards does nothing."""

    __slots__ = ("_buffer", "_closed", "held", "org", "peer")

    def __init__(self, buffer: Buffer, *, org: str, peer: str) -> None:
        self._buffer = buffer
        self._closed = False
        self.org = org
        self.peer = peer
        self.held = 0

    def has_room(self) -> bool:
        """Whether its org and its connection are within their shares."""
        return self._buffer.orgs.has_room(self.org) and self._buffer.peers.has_room(self.peer)

    def take(self, count: int) -> bool:
        """So many bytes more, if there is room."""
        if self._closed:
            return True
        buffer = self._buffer
        if not buffer.orgs.take(self.org, count):
            return False
        if not buffer.peers.take(self.peer, count):
            buffer.orgs.give_back(self.org, count)
            return False
        self.held += count
        return True

    async def reserve(self, count: int) -> None:
        """So many bytes more, as soon as there is room. Raises RouterFull."""
        if self._buffer.waits(self.org) or not self.take(count):
            await self._buffer.wait(self, count, WAIT_S_MAX)

    async def until_room(self, wait_s: float | None = None) -> None:
        """Returns once its org and its connection are within their shares. Raises RouterFull after `wait_s`."""
        while not self.has_room():
            await self._buffer.wait(self, 1, wait_s)
            self.give_back(1)

    def hold(self, count: int) -> None:
        """So many bytes more, whether or not there is room: they are in memory already."""
        if not self._closed:
            self._buffer.orgs.hold(self.org, count)
            self._buffer.peers.hold(self.peer, count)
            self.held += count

    def give_back(self, count: int) -> None:
        if count and not self._closed:
            self._buffer.orgs.give_back(self.org, count)
            self._buffer.peers.give_back(self.peer, count)
            self.held -= count
            self._buffer.freed()

    def set(self, count: int) -> None:
        """From now on it holds exactly so many bytes."""
        if count > self.held:
            self.hold(count - self.held)
        else:
            self.give_back(self.held - count)

    def close(self) -> None:
        self.give_back(self.held)
        self._closed = True
