"""Accounts for the memory of calls and streams in this process: requests that are being served, answers that have not
been sent, jobs that wait to be read. Memory is reserved before the work begins, and held until the last byte is written
or the client is gone (I9).

No org and no connection may hold more than is left free: one that is alone gets at most half, and the other half stays
free for others (shard/fair_quota.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from router.codec.status import RouterFull
from shard.fair_quota import FairQuota

# How long a call waits for memory before it is refused.
WAIT_S_MAX = 5.0
# How many orgs, and how many connections of an org, are checked each time that memory is freed.
_CHECKS_MAX = 16


class Buffer:
    """`bytes_max` bytes that orgs and connections share. Requests that wait for room are in memory already; they may
    use an eighth of that in addition."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.orgs = FairQuota(bytes_max)
        self.peers = FairQuota(bytes_max)
        self._received = FairQuota(bytes_max // 8)
        # The waiting requests, by org and then by connection. The most recently served org or connection comes last.
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Waiting]]] = OrderedDict()

    @property
    def held(self) -> int:
        return self.orgs.taken

    def waits(self, org: str) -> bool:
        """Returns whether calls of the org wait for memory."""
        return org in self._waiting

    async def wait(self, account: Account, count: int, wait_s: float | None, *, received: int = 0) -> None:
        """Returns once the account holds `count` more bytes. `received` is the memory that the waiting request itself
        takes. Raises RouterFull after `wait_s`, or at once if too many bytes wait."""
        if received and not self._received.take(account.peer, received):
            raise RouterFull("bytes in calls and answers", self.bytes_max)
        waiting = _Waiting(account, count, asyncio.get_running_loop().create_future())
        org, peer = account.org, account.peer
        by_peer = self._waiting.setdefault(org, OrderedDict())
        line = by_peer.setdefault(peer, deque())
        line.append(waiting)
        # Serve at once: the requests before this one may wait only because their own connections have no room.
        self._serve(org)
        try:
            async with asyncio.timeout(wait_s):
                await waiting.granted
        except BaseException as error:
            if waiting in line:
                line.remove(waiting)
                if not line:
                    del by_peer[peer]
                # The requests behind it may have room now.
                self._serve(org)
            elif not waiting.granted.cancelled():
                # It was granted in the same turn of the event loop in which the wait ended.
                account.give_back(count)
            if isinstance(error, TimeoutError):
                raise RouterFull("bytes in calls and answers", self.bytes_max) from None
            raise
        finally:
            self._received.give_back(account.peer, received)

    def freed(self) -> None:
        """Gives freed memory to waiting requests."""
        for _ in range(min(len(self._waiting), _CHECKS_MAX)):
            org = next(iter(self._waiting))
            self._waiting.move_to_end(org)
            self._serve(org)

    def _serve(self, org: str) -> None:
        """Grants memory to waiting requests of an org. If the org has no room for a request, all requests behind it
        wait too. If only its connection has no room, the requests of other connections are still served."""
        by_peer = self._waiting[org]
        for _ in range(min(len(by_peer), _CHECKS_MAX)):
            peer, line = next(iter(by_peer.items()))
            while line:
                first = line[0]
                # A cancelled request is removed here without a grant.
                cancelled = first.granted.done()
                if not cancelled and not first.account.take(first.count):
                    break
                line.popleft()
                if not cancelled:
                    first.granted.set_result(None)
            if not line:
                del by_peer[peer]
            elif self.orgs.fits(org, line[0].count):
                by_peer.move_to_end(peer)
            else:
                break
        if not by_peer:
            del self._waiting[org]


class _Waiting:
    """A request that waits for memory."""

    __slots__ = ("account", "count", "granted")

    def __init__(self, account: Account, count: int, granted: asyncio.Future[None]) -> None:
        self.account = account
        self.count = count
        self.granted = granted


class Account:
    """The memory that one call or stream holds of the buffer. After `close`, all methods do nothing."""

    __slots__ = ("_buffer", "_closed", "held", "org", "peer")

    def __init__(self, buffer: Buffer, *, org: str, peer: str) -> None:
        self._buffer = buffer
        self._closed = False
        self.org = org
        self.peer = peer
        self.held = 0

    def has_room(self) -> bool:
        """Returns whether its org and its connection are within their shares."""
        return self._buffer.orgs.has_room(self.org) and self._buffer.peers.has_room(self.peer)

    def take(self, count: int) -> bool:
        """Takes `count` more bytes if there is room. Returns whether it did."""
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

    def take_in_turn(self, count: int) -> bool:
        """Takes `count` more bytes if there is room and no other call of its org waits. Returns whether it did."""
        return not self._buffer.waits(self.org) and self.take(count)

    async def reserve(self, count: int, *, received: int = 0) -> None:
        """Takes `count` more bytes as soon as there is room. `received` is the memory that the waiting request itself
        takes. Raises RouterFull after 5 s."""
        if not self.take_in_turn(count):
            await self._buffer.wait(self, count, WAIT_S_MAX, received=received)

    def move(self, org: str) -> None:
        """Moves the account, with all that it holds, to another org."""
        self._buffer.orgs.give_back(self.org, self.held)
        self._buffer.orgs.hold(org, self.held)
        self.org = org

    async def until_room(self, wait_s: float | None = None) -> None:
        """Returns once its org and its connection are within their shares. Raises RouterFull after `wait_s`."""
        while not self.has_room():
            await self._buffer.wait(self, 1, wait_s)
            self.give_back(1)

    def hold(self, count: int) -> None:
        """Takes `count` more bytes even if there is no room, because they are in memory already."""
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
        """Takes or gives back bytes, so that the account holds exactly `count`."""
        if count > self.held:
            self.hold(count - self.held)
        else:
            self.give_back(self.held - count)

    def close(self) -> None:
        self.give_back(self.held)
        self._closed = True
