"""The way into one router process: who is inside, how much memory each holds, and when it has to end (I9).

A call is inside from its first byte until its answer has been sent or its peer is gone. It is counted by its connection
from the beginning, and by its org as soon as it has said which that is. Nobody fills the process: an org or a
connection that is alone has half of what there is, and as much is free for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

import grpc

from router.buffer import Account, Buffer
from router.connections import canonical
from router.deadlines import Deadlines
from router.status import RequestLate, RouterFull, ShuttingDown
from router.tracing import Tracing
from shard.places import Places

Context = grpc.aio.ServicerContext[Any, Any]

# Calls that are being served, and streams and calls that wait for jobs.
CALLS_MAX = 4_000
STREAMS_MAX = 10_000
# How long a unary request may take to come, from its first byte to its last.
RECEIVE_S_MAX = 60.0
# How long a peer may leave an answer unread. Then its connection is ended.
UNREAD_S_MAX = 30.0
# How many calls a connection may reset in a second before their requests have come. With more it is ended: each of them
# costs as much as a call that is served.
RESETS_MAX = 200
_RESETS_S = 1.0
# What a message takes on the wire beside its own bytes: frame headers, and the metadata of a call where it is short.
_OVERHEAD_BYTES = 64

_CALL: ContextVar[Call] = ContextVar("call")


class Call(Account):
    """One call or stream, and what it holds of the buffer."""

    __slots__ = ("counted",)

    def __init__(self, buffer: Buffer, *, peer: str) -> None:
        super().__init__(buffer, org="", peer=peer)
        # Whether it has a place among its org's calls.
        self.counted = False


def current_call() -> Call:
    """The call that this task serves."""
    return _CALL.get()


class Gate:
    """`buffer` is the memory that calls share. `hang_up` ends the connection of a peer, soon."""

    def __init__(self, tracing: Tracing, buffer: Buffer, hang_up: Callable[[str], None] = lambda _: None) -> None:
        self.tracing = tracing
        self.buffer = buffer
        self.draining = False
        # Bytes of requests that each connection has brought whole.
        self.delivered = Counter[str]()
        # Calls and streams of each connection.
        self.inside = Counter[str]()
        self._count = 0
        self._calls = Places(CALLS_MAX)
        self._streams = Places(STREAMS_MAX)
        self._hang_up = hang_up
        self._receiving = Deadlines[asyncio.Task[Any]](RECEIVE_S_MAX, self._receives_late)
        self._late: set[asyncio.Task[Any]] = set()
        self._unread = Deadlines[Call](UNREAD_S_MAX, lambda call: hang_up(call.peer))
        self._resets = Counter[str]()
        self._resets_until_s = 0.0
        self._emptied = asyncio.Event()

    # ── The way in and out ───────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, context: Context) -> Call:
        """Lets a call in, for as long as the task runs that serves it. Raises ShuttingDown, RouterFull."""
        if self.draining:
            raise ShuttingDown
        if self._count >= CALLS_MAX + STREAMS_MAX:
            raise RouterFull("calls and streams", CALLS_MAX + STREAMS_MAX)
        call = Call(self.buffer, peer=canonical(context.peer()))
        _CALL.set(call)
        task = asyncio.current_task()
        assert task is not None
        self._count += 1
        self.inside[call.peer] += 1
        # gRPC sends the answer within the same task. Its own callback would be a reference cycle.
        task.add_done_callback(functools.partial(self._ended, call))
        return call

    def _ended(self, call: Call, _: asyncio.Task[Any]) -> None:
        self._unread.end(call)
        if call.counted:
            self._calls.give_back(call.org)
        call.close()
        self._count -= 1
        self.inside[call.peer] -= 1
        if not self.inside[call.peer]:
            del self.inside[call.peer]
            if self.draining:
                self._hang_up(call.peer)
        if self.draining and not self._count:
            self._emptied.set()

    async def receive(self, context: Context, call: Call) -> bytes:
        """The request of a unary call. Raises RequestLate; CancelledError where its client has left."""
        task = asyncio.current_task()
        assert task is not None
        self._receiving.begin(task)
        try:
            raw: bytes | object = await context.read()
        except asyncio.CancelledError:
            if task not in self._late:
                self._was_reset(call)
                raise
            task.uncancel()
            raise RequestLate(RECEIVE_S_MAX) from None
        finally:
            self._receiving.end(task)
            self._late.discard(task)
        if not isinstance(raw, bytes):
            self._was_reset(call)
            raise asyncio.CancelledError
        self.received(call, raw)
        return raw

    def _was_reset(self, call: Call) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._resets_until_s:
            self._resets.clear()
            self._resets_until_s = now_s + _RESETS_S
        self._resets[call.peer] += 1
        if self._resets[call.peer] == RESETS_MAX:
            self._hang_up(call.peer)

    def received(self, call: Call, raw: bytes) -> None:
        """A message of this call has come whole."""
        self.delivered[call.peer] += len(raw) + _OVERHEAD_BYTES

    def _receives_late(self, task: asyncio.Task[Any]) -> None:
        self._late.add(task)
        task.cancel()

    async def enter(self, call: Call, org: str, count: int) -> None:
        """The call is this org's, and takes so many bytes until it is answered. Raises RouterFull."""
        call.org = org
        if not self._calls.take(org):
            raise RouterFull("calls", CALLS_MAX)
        call.counted = True
        await call.reserve(count)

    def answered(self, call: Call, count: int) -> None:
        """From now on gRPC has the answer, which the peer is to read."""
        call.set(count)
        self._unread.begin(call)

    # ── What stays ───────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def stream(self, whose: str) -> Generator[None, None, None]:
        """A place among the streams. Raises RouterFull."""
        if not self._streams.take(whose):
            raise RouterFull("streams and waiting calls", STREAMS_MAX)
        try:
            yield
        finally:
            self._streams.give_back(whose)

    @contextlib.contextmanager
    def waiting(self, call: Call) -> Generator[None, None, None]:
        """For a call that waits for jobs: meanwhile it counts as a stream. Raises RouterFull."""
        with self.stream(call.org):
            self._calls.give_back(call.org)
            call.counted = False
            try:
                yield
            finally:
                self._calls.hold(call.org)
                call.counted = True

    def writing(self, call: Call) -> None:
        """A stream hands gRPC a message, which its peer is to read."""
        self._unread.begin(call)

    def written(self, call: Call) -> None:
        self._unread.end(call)

    # ── The end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """Refuses new calls. The connection of each call that ends is hung up, so that its client goes elsewhere."""
        self.draining = True
        if not self._count:
            self._emptied.set()

    async def empty(self) -> None:
        """Returns once a gate that drains has nobody inside."""
        await self._emptied.wait()
