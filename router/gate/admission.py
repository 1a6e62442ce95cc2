"""Admission to one router process: counts calls, streams and their memory, and limits how long a request may take to
arrive and how long an answer may stay unread (I9). The deadline of a call is set in router/gate/calls.py.

A call counts from its first byte until its answer has been sent or its client is gone. It counts for its connection
from the beginning, for its caller's org as soon as the caller is known, and for the org of its request as soon as that
org is known. No org and no connection can fill the process: a single org or connection gets at most half of each limit,
and the other half stays free (shard/fair_quota.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import grpc

from router.buffer import Buffer
from router.codec.status import MessageTooLarge, RequestLate, RouterFull, ShuttingDown
from router.gate.arrivals import CALL_BYTES, MESSAGE_BYTES, Arrivals
from router.gate.call import Call
from router.gate.connections import canonical
from router.gate.deadlines import Deadlines
from router.gate.tracing import Tracing
from shard.fair_quota import FairQuota

if TYPE_CHECKING:
    # Only type checkers need these imports.
    from router.gate.audit import Audit
    from router.gate.auth.authenticator import Authenticator

Context = grpc.aio.ServicerContext[Any, Any]

# The most calls that one process serves at a time, and the most streams and waiting calls together.
CALLS_MAX = 4_000
STREAMS_MAX = 10_000
# A stream or waiting call takes one place, and one more place for every QUEUES_PER_PLACE queues that it waits for. Each
# queue that it waits for takes 1.3 KiB of memory; the rest of a stream takes 45 KiB.
QUEUES_PER_PLACE = 16
# Calls that anybody may make, such as those of the health service. They have a limit of their own, so that strangers
# cannot take the places of callers who prove who they are.
PUBLIC_CALLS_MAX = 500
# The largest request of a call that anybody may make: the request has only the name of a service.
PUBLIC_MESSAGE_BYTES_MAX = 4 * 1024
# The largest request, and the largest message of a stream: 1,000 jobs of 16 KiB, or 15 jobs of the largest size.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
# The largest size of all metadata of a call. gRPC counts 32 bytes more for each entry. Until the client has
# acknowledged this limit, gRPC takes up to 16 MiB, and an attacker need not acknowledge it.
METADATA_BYTES_MAX = 16 * 1024
# How much refused metadata may wait for the garbage collector.
_METADATA_GARBAGE_MAX = 4 * 1024 * 1024
# gRPC hands over messages up to this size; the gate refuses those above MESSAGE_BYTES_MAX without decoding them. Even a
# message with 1,000 acks and the largest results is below this size. The size must not exceed the smallest buffer
# (memory_mib = 512).
RECEIVED_BYTES_MAX = 64 * 1024 * 1024
# How long a unary request may take to arrive, from its first byte to its last.
RECEIVE_S_MAX = 60.0
# How long a client may leave an answer unread before its connection is closed.
UNREAD_S_MAX = 30.0
# How long a stream that the router ends waits for its client to close its side.
DRAIN_S = 2.0
# How many calls a connection may reset per second before their requests have arrived. With more resets the connection
# is closed, because each such call costs as much as a served one.
RESETS_MAX = 200
_RESETS_S = 1.0


class Gate:
    """Lets calls in and counts them.

    `buffer` is the memory that calls share. `hang_up` closes the connection of a peer soon after it is called.
    `authenticator`: None if everybody may make every call. `audit`: None if the cluster keeps no audit log.
    """

    def __init__(
        self,
        tracing: Tracing,
        buffer: Buffer,
        hang_up: Callable[[str], None] = lambda _: None,
        authenticator: Authenticator | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.tracing = tracing
        self.buffer = buffer
        self.authenticator = authenticator
        self.audit = audit
        self.draining = False
        # The time, by the event loop's clock, from which a draining gate refuses all calls.
        self._refuse_from_s = 0.0
        self.arrivals = Arrivals()
        self._count = 0
        # By org: the calls and streams of callers that may act only for this org. These calls count even if their
        # requests never come.
        self._of_callers = FairQuota(CALLS_MAX + STREAMS_MAX)
        self._calls = FairQuota(CALLS_MAX)
        self._streams = FairQuota(STREAMS_MAX)
        self._public = FairQuota(PUBLIC_CALLS_MAX)
        self._hang_up = hang_up
        self._receiving = Deadlines[asyncio.Task[Any]](RECEIVE_S_MAX, self._receive_timed_out)
        self._timed_out: set[asyncio.Task[Any]] = set()
        self._unread = Deadlines[Call](UNREAD_S_MAX, lambda call: hang_up(call.peer))
        # Bytes of refused metadata since the last collection.
        self._metadata_garbage = 0
        self._resets = Counter[str]()
        self._resets_until_s = 0.0
        self._emptied = asyncio.Event()

    # ── Calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, context: Context) -> Call:
        """Lets a call in. The call counts until the current task, which serves it, ends. Raises ShuttingDown,
        RouterFull."""
        call = Call(self.buffer, peer=canonical(context.peer()))
        inside = self.arrivals.inside[call.peer]
        if self.draining and (not inside or asyncio.get_running_loop().time() >= self._refuse_from_s):
            raise ShuttingDown
        # A connection may have as many calls as are free, as in shard/fair_quota.py.
        if inside >= CALLS_MAX + STREAMS_MAX - self._count:
            raise RouterFull("calls and streams", CALLS_MAX + STREAMS_MAX)
        call.set_current()
        task = asyncio.current_task()
        assert task is not None
        self._count += 1
        call.round = self.arrivals.begin(call.peer)
        # gRPC sends the answer within this task. A callback of the gRPC context would create a reference cycle.
        task.add_done_callback(functools.partial(self._ended, call))
        return call

    def identified(self, call: Call) -> None:
        """If the caller may act only for one org, counts the call and its memory for this org until the call ends.
        Raises RouterFull."""
        assert call.principal is not None
        if call.principal.org is not None:
            call.org = call.principal.org
            if not self._of_callers.take(call.principal.org):
                raise RouterFull("calls and streams", CALLS_MAX + STREAMS_MAX)
            call.caller_counted = True

    def _ended(self, call: Call, _: asyncio.Task[Any]) -> None:
        self._unread.end(call)
        if call.caller_counted:
            assert call.principal is not None
            self._of_callers.give_back(call.principal.org)
        if call.counted:
            self._calls.give_back(call.org)
        call.close()
        self._count -= 1
        self.arrivals.end(call.peer, call.round)
        if self.draining and call.peer not in self.arrivals.inside:
            self._hang_up(call.peer)
        if self.draining and not self._count:
            self._emptied.set()

    async def receive(self, context: Context, call: Call, *, bytes_max: int = MESSAGE_BYTES_MAX) -> bytes:
        """Returns the request of a unary call. Raises RequestLate after 60 s, MessageTooLarge, and CancelledError if
        the client has left."""
        task = asyncio.current_task()
        assert task is not None
        self._receiving.begin(task)
        try:
            raw: bytes | object = await context.read()
        except asyncio.CancelledError:
            if task not in self._timed_out:
                self.was_reset(call)
                raise
            task.uncancel()
            raise RequestLate(RECEIVE_S_MAX) from None
        finally:
            self._receiving.end(task)
            self._timed_out.discard(task)
        if not isinstance(raw, bytes):
            self.was_reset(call)
            raise asyncio.CancelledError
        self.arrivals.received(call.peer, call.round, CALL_BYTES + MESSAGE_BYTES + len(raw))
        if len(raw) > bytes_max:
            raise MessageTooLarge(len(raw), bytes_max)
        return raw

    def refuse_metadata(self, context: Context, count: int) -> None:
        """Call this for a call with `count` bytes of metadata, more than METADATA_BYTES_MAX. Closes the call's
        connection: its client has not acknowledged the limit, and may send thousands of such calls."""
        self._hang_up(canonical(context.peer()))
        # grpc.aio leaves the metadata of each call in a reference cycle. The garbage collector by itself would run only
        # after thousands of calls.
        self._metadata_garbage += count
        if self._metadata_garbage > _METADATA_GARBAGE_MAX:
            self._metadata_garbage = 0
            gc.collect(1)

    def was_reset(self, call: Call) -> None:
        """Counts a request whose client left before the request was received. Closes the connection of a client that
        does this too often."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._resets_until_s:
            self._resets.clear()
            self._resets_until_s = now_s + _RESETS_S
        self._resets[call.peer] += 1
        if self._resets[call.peer] == RESETS_MAX:
            self._hang_up(call.peer)

    def received(self, call: Call, raw: bytes) -> None:
        """Counts a message of a stream that was received completely."""
        self.arrivals.received(call.peer, call.round, MESSAGE_BYTES + len(raw))

    def _receive_timed_out(self, task: asyncio.Task[Any]) -> None:
        self._timed_out.add(task)
        task.cancel()

    def admit(self, call: Call, org: str) -> None:
        """Counts the call for this org from now on. Raises RouterFull if the org has too many calls."""
        call.org = org
        if not self._calls.take(org):
            raise RouterFull("calls", CALLS_MAX)
        call.counted = True

    def answered(self, call: Call, count: int) -> None:
        """Call this when gRPC has got an answer of `count` bytes. The client must read it within 30 s."""
        call.set(count)
        self._unread.begin(call)

    # ── Streams and waiting calls ────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def stream(self, key: str, queues: int = 0) -> Generator[None, None, None]:
        """Counts a stream for `key`, an org or a connection, within this scope. `queues`: for how many queues it waits.
        Raises RouterFull."""
        places = 1 + queues // QUEUES_PER_PLACE
        if not self._streams.take(key, places):
            raise RouterFull("streams and waiting calls", STREAMS_MAX)
        try:
            yield
        finally:
            self._streams.give_back(key, places)

    @contextlib.contextmanager
    def waiting(self, call: Call, queues: int = 0) -> Generator[None, None, None]:
        """Within this scope, counts a waiting call as a stream and not as a call. `queues`: for how many queues it
        waits. Raises RouterFull."""
        with self.stream(call.org, queues), self.lasting(call):
            self._calls.give_back(call.org)
            call.counted = False
            try:
                yield
            finally:
                self._calls.hold(call.org)
                call.counted = True

    def lasting(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Interrupts the current task within this scope when the caller's key, token or certificate is no longer valid.
        Then raises what Authenticator.lasting raises."""
        if self.authenticator is None or call.principal is None:
            return contextlib.nullcontext()
        return self.authenticator.lasting(call.principal)

    @contextlib.contextmanager
    def public(self, call: Call) -> Generator[None, None, None]:
        """Counts a call that needs no authentication for the call's connection, until this scope ends. Raises
        RouterFull.
        """
        if not self._public.take(call.peer):
            raise RouterFull("calls that anybody may make", PUBLIC_CALLS_MAX)
        try:
            yield
        finally:
            self._public.give_back(call.peer)

    def writing(self, call: Call) -> None:
        """Call this before a stream passes a message to gRPC. The client must read it within 30 s."""
        self._unread.begin(call)

    def written(self, call: Call) -> None:
        """Call this when gRPC has taken the message, because the client has read enough of the earlier ones."""
        self._unread.end(call)

    # ── Drain ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """Closes each connection when its last call ends, so that its client uses another router. For DRAIN_S, a
        connection that still has calls may begin more calls: perhaps it is open only because one of its streams waits
        for the client to close its side."""
        self.draining = True
        self._refuse_from_s = asyncio.get_running_loop().time() + DRAIN_S
        if not self._count:
            self._emptied.set()

    async def empty(self) -> None:
        """Waits until the gate drains and all calls have ended."""
        await self._emptied.wait()
