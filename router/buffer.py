"""Accounts for the memory of calls and streams in this process: requests that are being served, answers that have not
been sent, jobs that wait to be read. Memory is reserved before the work begins, and held until the last byte is written
or the client is gone (I9).

No org and no connection may hold more memory than is free. So a single org or connection gets at most half, and the
other half stays free for others (shard/fair_quota.py). The claims on one shard may not reserve more than is free
either, because they hold this memory for seconds if the shard does not answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

from router.codec.status import RouterFull
from shard.fair_quota import FairQuota
from shard.queue.claim import bytes_most
from shard.vocabulary import ShardName

# How long a call waits for memory before it is refused.
WAIT_S_MAX = 5.0
# How many orgs, and how many connections of an org, are checked each time that memory is freed.
_CHECKS_MAX = 16
# An account drops the parts that hold nothing when it has too many parts: twice as many as it kept the last time, plus
# this number.
_PARTS_KEPT = 100
# The most that one claim reserves. A claim begins only if its shard has room for this: otherwise claims of few jobs,
# which always find room sooner, could keep a claim of many jobs waiting for ever.
_LARGEST_CLAIM = bytes_most(1000)


class Buffer:
    """`bytes_max` bytes that orgs and connections share. Requests that wait for room are in memory already; they may
    take an eighth of `bytes_max` in addition."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.orgs = FairQuota(bytes_max)
        self.peers = FairQuota(bytes_max)
        # What claims have reserved, by shard.
        self.claims = FairQuota(bytes_max)
        self._received = FairQuota(bytes_max // 8)
        # The waiting requests, first by the shard that they claim from (None: they are not claims), then by org, then
        # by connection. The requests are kept apart by shard, so that claims on a shard without room keep no other
        # requests waiting. At each of these levels, the key that was served most recently comes last.
        self._waiting: OrderedDict[ShardName | None, OrderedDict[str, OrderedDict[str, deque[_Waiting]]]] = (
            OrderedDict()
        )

    @property
    def held(self) -> int:
        return self.orgs.taken

    def waits(self, org: str, shard: ShardName | None = None) -> bool:
        """Returns whether claims of the org on this shard wait for memory. If `shard` is None, returns whether requests
        of the org that are not claims wait for memory."""
        return org in self._waiting.get(shard, ())

    def held_by(self, org: str) -> int:
        """Returns how many bytes calls and streams of the org hold."""
        return self.orgs.held(org)

    def has_room_for_claims(self, shard: ShardName | None) -> bool:
        return shard is None or self.claims.fits(shard, _LARGEST_CLAIM)

    async def wait(
        self,
        account: Account,
        count: int,
        wait_s: float | None,
        *,
        received: int = 0,
        shard: ShardName | None = None,
    ) -> None:
        """Waits until the account holds `count` more bytes. `received` is the memory that the waiting request itself
        takes. If the request is a claim, `shard` is the shard that it claims from. Raises RouterFull after `wait_s`, or
        at once if the waiting requests would take too much memory."""
        if received and not self._received.take(account.peer, received):
            raise RouterFull("bytes in calls and answers", self.bytes_max)
        waiting = _Waiting(account, count, asyncio.get_running_loop().create_future())
        org, peer = account.org, account.peer
        by_peer = self._waiting.setdefault(shard, OrderedDict()).setdefault(org, OrderedDict())
        line = by_peer.setdefault(peer, deque())
        line.append(waiting)
        # Serve at once: the requests before this one may wait only because their own connections have no room.
        self._serve(shard, org)
        try:
            async with asyncio.timeout(wait_s):
                await waiting.granted
        except BaseException as error:
            if waiting in line:
                line.remove(waiting)
                if not line:
                    del by_peer[peer]
                # The requests that waited behind this request may have room now.
                self._serve(shard, org)
            elif not waiting.granted.cancelled():
                # The memory was granted in the same iteration of the event loop in which the wait ended.
                account.give_back(count, shard=shard)
            if isinstance(error, TimeoutError):
                raise RouterFull("bytes in calls and answers", self.bytes_max) from None
            raise
        finally:
            self._received.give_back(account.peer, received)

    def freed(self) -> None:
        """Gives freed memory to waiting requests."""
        if not self._waiting:
            return
        self._waiting.move_to_end(next(iter(self._waiting)))
        for shard, orgs in list(self._waiting.items()):
            for _ in range(min(len(orgs), _CHECKS_MAX)):
                if not self.has_room_for_claims(shard):
                    break
                org = next(iter(orgs))
                orgs.move_to_end(org)
                self._serve(shard, org)

    def _serve(self, shard: ShardName | None, org: str) -> None:
        """Grants memory to waiting requests of an org: to its claims on this shard, or, if `shard` is None, to its
        requests that are not claims. If the org or the shard has no room for a request, all requests behind it wait
        too. If only the connection of the request has no room, the requests of other connections are still served."""
        by_peer = self._waiting[shard][org]
        for _ in range(min(len(by_peer), _CHECKS_MAX)):
            peer, line = next(iter(by_peer.items()))
            while line:
                first = line[0]
                # A cancelled request is removed here without a grant.
                cancelled = first.granted.done()
                if not cancelled and not first.account.take(first.count, shard=shard):
                    break
                line.popleft()
                if not cancelled:
                    first.granted.set_result(None)
            if not line:
                del by_peer[peer]
            elif self.orgs.fits(org, line[0].count) and self.has_room_for_claims(shard):
                by_peer.move_to_end(peer)
            else:
                break
        if not by_peer:
            del self._waiting[shard][org]
            if not self._waiting[shard]:
                del self._waiting[shard]


class _Waiting:
    """A request that waits for memory."""

    __slots__ = ("account", "count", "granted")

    def __init__(self, account: Account, count: int, granted: asyncio.Future[None]) -> None:
        self.account = account
        self.count = count
        self.granted = granted


class Account:
    """The part of the buffer's memory that one call or stream holds. After `close`, all methods do nothing."""

    __slots__ = ("_buffer", "_claims", "_closed", "_parts", "_parts_max", "held", "org", "peer")

    def __init__(self, buffer: Buffer, *, org: str, peer: str) -> None:
        self._buffer = buffer
        self._closed = False
        # How much of `held` is reserved for claims, by shard.
        self._claims = Counter[ShardName]()
        # Accounts of the memory that this call or stream holds for other orgs, by org.
        self._parts: dict[str, Account] = {}
        # When there are this many parts, those that hold nothing are dropped.
        self._parts_max = _PARTS_KEPT
        self.org = org
        self.peer = peer
        self.held = 0

    def of(self, org: str) -> Account:
        """Returns the part of this account that is held for another org. The part is an account itself, and is closed
        with this one. Callers must not keep a part that holds nothing, because such a part may be dropped."""
        part = self._parts.get(org)
        if part is None:
            if len(self._parts) >= self._parts_max:
                self._parts = {name: kept for name, kept in self._parts.items() if kept.held}
                self._parts_max = 2 * len(self._parts) + _PARTS_KEPT
            part = self._parts[org] = Account(self._buffer, org=org, peer=self.peer)
        return part

    def take(self, count: int, *, shard: ShardName | None = None) -> bool:
        """Takes `count` more bytes if there is room. Returns whether it did. `shard`: the bytes are for a claim on this
        shard."""
        if self._closed:
            return True
        buffer = self._buffer
        if not buffer.has_room_for_claims(shard) or not buffer.orgs.take(self.org, count):
            return False
        if not buffer.peers.take(self.peer, count):
            buffer.orgs.give_back(self.org, count)
            return False
        if shard is not None:
            buffer.claims.hold(shard, count)
            self._claims[shard] += count
        self.held += count
        return True

    def take_in_turn(self, count: int, *, shard: ShardName | None = None) -> bool:
        """Takes `count` more bytes if there is room and no earlier request of the org waits (`Buffer.waits`). Returns
        whether it did. If the bytes are for a claim, `shard` is the shard of the claim."""
        return not self._buffer.waits(self.org, shard) and self.take(count, shard=shard)

    async def reserve(
        self, count: int, *, received: int = 0, patiently: bool = False, shard: ShardName | None = None
    ) -> None:
        """Takes `count` more bytes as soon as there is room. `received` is the memory that the waiting request itself
        takes. If the bytes are for a claim, `shard` is the shard of the claim. Raises RouterFull after 5 s, unless
        `patiently` is true."""
        if not self.take_in_turn(count, shard=shard):
            wait_s = None if patiently else WAIT_S_MAX
            await self._buffer.wait(self, count, wait_s, received=received, shard=shard)

    def move(self, org: str) -> None:
        """Moves the account, with all that it holds, to another org."""
        self._buffer.orgs.give_back(self.org, self.held)
        self._buffer.orgs.hold(org, self.held)
        self.org = org

    def hold(self, count: int) -> None:
        """Takes `count` more bytes even if there is no room, because they are in memory already."""
        if not self._closed:
            self._buffer.orgs.hold(self.org, count)
            self._buffer.peers.hold(self.peer, count)
            self.held += count

    def give_back(self, count: int, *, shard: ShardName | None = None) -> None:
        """Gives bytes back. `shard`: they were taken for a claim on this shard."""
        if count and not self._closed:
            if shard is not None:
                self._buffer.claims.give_back(shard, count)
                self._claims[shard] -= count
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
        for part in self._parts.values():
            part.close()
        for shard, count in self._claims.items():
            self._buffer.claims.give_back(shard, count)
        self.give_back(self.held)
        self._closed = True
