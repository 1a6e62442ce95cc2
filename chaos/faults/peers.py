"""Faults that hostile clients cause: they do not read answers, do not finish requests, or reset their calls."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from chaos.faults.fault import Fault
from chaos.stage import Cast
from proof import hostile_peer
from proof.clients.site import QUEUE
from windrow.v1 import admin_pb2, queue_pb2

_ENQUEUE = "/windrow.v1.Queue/Enqueue"
_CONSUME = "/windrow.v1.Queue/Consume"
_LIST_JOBS = "/windrow.v1.Admin/ListJobs"
# The longest time of an attack. It is longer than any fault lasts, so that an attack ends only when the fault is
# healed.
_SECONDS_MAX = 60.0
_BUSY_ORGS = 5
_STREAMS_OF_ORG = 4
_CREDIT = 20
_ANSWERS_OF_ORG = 10
_REQUESTS = 16
_REQUEST_BYTES = 4 * 1024 * 1024
_RESETS_AT_ONCE = 2_000
_RESETS_EVERY_S = 0.5


class _HostilePeers(Fault):
    """Attacks over connections of its own until the fault is healed. The kernel decides which router each connection
    reaches."""

    _attack: asyncio.Future[Any] | None = None

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return ["peers"]

    async def inject(self) -> None:
        self._attack = asyncio.gather(*self.attacks())

    async def heal(self) -> None:
        if self._attack is not None:
            self._attack.cancel()
            ended: object = (await asyncio.gather(self._attack, return_exceptions=True))[0]
            # Ignore OSError: a router that was killed meanwhile refuses connections.
            if isinstance(ended, Exception) and not isinstance(ended, OSError):
                raise ended

    @abc.abstractmethod
    def attacks(self) -> Sequence[Coroutine[Any, Any, Any]]:
        """Returns the attacks, which run at the same time."""


class SlowReaders(_HostilePeers):
    """Opens streams that lease jobs of the busiest orgs, and makes calls with long answers. Reads neither the streams
    nor the answers."""

    name = "slow-readers"

    def attacks(self) -> Sequence[Coroutine[Any, Any, Any]]:
        return [attack for org in self.stage.cast.org_names[:_BUSY_ORGS] for attack in self._of(org)]

    def _of(self, org: str) -> list[Coroutine[Any, Any, Any]]:
        start = queue_pb2.ConsumeStart(org=org, queues=[QUEUE], worker="slow reader")
        start.visibility_window.FromMilliseconds(round(1000 * self.stage.cast.window_s))
        consume = queue_pb2.ConsumeRequest(start=start, credit=_CREDIT).SerializeToString()
        listing = admin_pb2.ListJobsRequest(org=org, page_size=1000, include_payload=True).SerializeToString()
        address, seconds = self.stage.address, _SECONDS_MAX
        return [
            hostile_peer.leave_answers_unread(
                address, _CONSUME, consume, calls=_STREAMS_OF_ORG, connections=2, seconds=seconds, ends=False
            ),
            hostile_peer.leave_answers_unread(address, _LIST_JOBS, listing, calls=_ANSWERS_OF_ORG, seconds=seconds),
        ]


class UnfinishedRequests(_HostilePeers):
    """Sends large requests without their last byte."""

    name = "unfinished-requests"

    def attacks(self) -> Sequence[Coroutine[Any, Any, Any]]:
        return [
            hostile_peer.leave_requests_unfinished(
                self.stage.address,
                _ENQUEUE,
                size_bytes=_REQUEST_BYTES,
                calls=_REQUESTS,
                connections=4,
                seconds=_SECONDS_MAX,
            )
        ]


class RapidResets(_HostilePeers):
    """Opens calls and resets them at once, thousands a second."""

    name = "rapid-resets"

    def attacks(self) -> Sequence[Coroutine[Any, Any, Any]]:
        return [self._again_and_again()]

    async def _again_and_again(self) -> None:
        while True:
            await hostile_peer.reset_rapidly(self.stage.address, _ENQUEUE, count=_RESETS_AT_ONCE, seconds=_SECONDS_MAX)
            await asyncio.sleep(_RESETS_EVERY_S)
