"""Lets the router processes of one supervisor hand jobs over to each other's consumers (docs/decisions/0037).

Processes tell each other for which queues they have consumers that are ready to be handed jobs. That is a hint (I7). An
enqueue that finds too few consumers in its own process asks a sibling that has ready consumers. The sibling promises
places at its consumers, and the insert leases the jobs to these consumers. Then the sibling is told which jobs were
leased. If no promise comes in time, the jobs are stored as they would be without siblings, and the doorbell is rung for
their queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from router.buffer import Buffer
from router.fleet.siblings.asks import Asked, Asks, Promise
from router.fleet.siblings.frame import Frame, QueueKey
from router.fleet.siblings.link import Link
from router.fleet.siblings.promises import Consumers, Promises
from shard.fair_quota import FairQuota
from shard.vocabulary import NewJobs, QueueName, ShardName

# The most queues with ready consumers of which this process tells its siblings, summed over the siblings. Each sibling
# gets an equal part of this number, and orgs share that part (I4). The siblings are not told of further queues. All
# processes do the same, so all siblings together tell a process of no more queues than this.
_HINTS_MAX = 20_000
# When this process ends, it waits at most this long until its siblings have received the jobs that were leased to their
# consumers.
_FINISH_S_MAX = 1.0


class Siblings:
    """The siblings of this process. `consumers` returns the consumers of this process on a shard, and `ready` returns
    all queues for which any consumer of this process is ready."""

    def __init__(
        self,
        buffer: Buffer,
        *,
        consumers: Callable[[ShardName], Consumers | None],
        ready: Callable[[], Iterable[QueueKey]],
    ) -> None:
        self._buffer = buffer
        self._consumers = consumers
        self._ready = ready
        self._siblings: set[_Sibling] = set()
        # Keeps the tasks alive, because the event loop has only weak references to them.
        self._connecting: set[asyncio.Task[Any]] = set()
        # For each queue, the siblings that have ready consumers. The sibling that was asked last is the last one.
        self._hints: dict[QueueKey, OrderedDict[_Sibling, None]] = {}

    def connect(self, connection: socket.socket) -> None:
        """Talks to a sibling over this connection until either process ends."""
        sibling = _Sibling(self._buffer, self._consumers, self._opened, self._hinted, self._lost)
        self._siblings.add(sibling)
        self._divide_hints()
        connecting = asyncio.create_task(self._connect(sibling, connection))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def _connect(self, sibling: _Sibling, connection: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: sibling.link, sock=connection)
        sibling.link.greet()

    # ── Hints ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tell_ready(self, key: QueueKey) -> None:
        """Tells the siblings that a consumer of this process waits for the queue, and can be handed jobs."""
        for sibling in self._siblings:
            sibling.tell_ready(key)

    def tell_gone(self, key: QueueKey) -> None:
        """Tells the siblings that no consumer of this process waits for the queue any more."""
        for sibling in self._siblings:
            sibling.tell_gone(key)

    def _divide_hints(self) -> None:
        for sibling in self._siblings:
            sibling.places.places_max = _HINTS_MAX // len(self._siblings)

    def _opened(self, sibling: _Sibling) -> None:
        for key in self._ready():
            sibling.tell_ready(key)

    def _hinted(self, sibling: _Sibling, key: QueueKey, is_ready: bool) -> None:
        if is_ready:
            self._hints.setdefault(key, OrderedDict())[sibling] = None
        elif (ready := self._hints.get(key)) is not None:
            ready.pop(sibling, None)
            if not ready:
                del self._hints[key]

    def _lost(self, sibling: _Sibling) -> None:
        self._siblings.discard(sibling)
        self._divide_hints()
        for key in list(self._hints):
            self._hinted(sibling, key, False)

    # ── Enqueues ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def any_ready(self) -> bool:
        """Returns whether any sibling has ready consumers for any queue."""
        return bool(self._hints)

    async def ask(self, shard: ShardName, jobs: NewJobs, positions: Mapping[QueueName, Sequence[int]]) -> list[Promise]:
        """Asks siblings that have ready consumers for places for the jobs at these positions. Returns the promises that
        came within a few milliseconds."""
        asked: list[Asked] = []
        for queue, of_queue in positions.items():
            key = QueueKey(shard, jobs.org, queue)
            ready = self._hints.get(key, OrderedDict[_Sibling, None]())
            sibling = next((sibling for sibling in ready if sibling.asks.may_ask()), None)
            if sibling is not None:
                ready.move_to_end(sibling)
                if (one := sibling.asks.ask(key, jobs, of_queue)) is not None:
                    asked.append(one)
        try:
            return [promise for one in asked if (promise := await one.promise) is not None]
        except asyncio.CancelledError:
            for one in asked:
                one.abandon()
            raise

    async def finish(self) -> None:
        """Waits, for 1 s at most, until the siblings have received the jobs that were leased to their consumers. Then
        closes the connections."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_S_MAX):
                for sibling in list(self._siblings):
                    await sibling.asks.finish()
        for sibling in list(self._siblings):
            sibling.link.close()


class _Sibling:
    """One sibling: what it has told this process, and what this process has told it."""

    def __init__(
        self,
        buffer: Buffer,
        consumers: Callable[[ShardName], Consumers | None],
        on_open: Callable[[_Sibling], None],
        on_hint: Callable[[_Sibling, QueueKey, bool], None],
        on_closed: Callable[[_Sibling], None],
    ) -> None:
        self._on_hint = on_hint
        self._on_closed = on_closed
        # The queues for which the sibling was told that consumers are ready. The sibling assumes this until it is told
        # the opposite, or until it has asked and got too few places.
        self._told: set[QueueKey] = set()
        # Bounds the number of queues of which the sibling may be told.
        self.places = FairQuota(_HINTS_MAX)
        self.link = Link(
            version=version("windrow-server"),
            on_open=lambda: on_open(self),
            on_frame=self._receive,
            on_closed=self._close,
        )
        self.asks = Asks(self.link, buffer, on_in_vain=lambda key: on_hint(self, key, False))
        self._promises = Promises(self.link, consumers, on_in_vain=self._asked_in_vain)

    def tell_ready(self, key: QueueKey) -> None:
        """Tells the sibling that consumers are ready, unless it has been told of too many queues of this org, or of all
        orgs."""
        if key not in self._told and self.link.is_open and self.places.take(key.org):
            self._told.add(key)
            self._tell(key, True)

    def tell_gone(self, key: QueueKey) -> None:
        if self._forget(key):
            self._tell(key, False)

    def _forget(self, key: QueueKey) -> bool:
        """Removes a queue from those of which the sibling was told. Returns whether it was one of them."""
        if key not in self._told:
            return False
        self._told.discard(key)
        self.places.give_back(key.org)
        return True

    def _tell(self, key: QueueKey, is_ready: bool) -> None:
        """Tells the sibling whether consumers of this queue are ready. If the opposite hint still waits to be sent,
        only removes that hint, because the sibling has not received it."""
        hints = self.link.out.hints
        if hints.get(key, is_ready) != is_ready:
            del hints[key]
        else:
            hints[key] = is_ready
            self.link.send_soon()

    def _asked_in_vain(self, key: QueueKey) -> None:
        # The answer tells the sibling that there are too few places. Remove a hint that still waits to be sent, because
        # the hint is older than the answer but would be received later.
        self._forget(key)
        self.link.out.hints.pop(key, None)

    def _receive(self, frame: Frame) -> None:
        # Process the answers before the hints: an answer with too few places cancels an older hint, and the hints of
        # this frame are newer than its answers.
        for answer in frame.answers:
            self.asks.on_answer(answer)
        for key, is_ready in frame.hints.items():
            self._on_hint(self, key, is_ready)
        for ask in frame.asks:
            self._promises.on_ask(ask)
        for outcome in frame.outcomes:
            self._promises.on_outcome(outcome)
        for number in frame.received:
            self.asks.on_received(number)

    def _close(self) -> None:
        self._on_closed(self)
        self.asks.close()
        self._promises.close()
