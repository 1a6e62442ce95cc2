"""The standard health service (grpc.health.v1). Its watches end when the router drains, so that they do not delay the
drain."""

from __future__ import annotations

import contextlib
from typing import cast

from grpc_health.v1 import health, health_pb2

from router.gate.admission import Context, Gate
from router.gate.call import current_call


class HealthService(health.aio.HealthServicer):
    """Ends each watch after NOT_SERVING has been sent. The base class would keep it open for ever."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        with contextlib.suppress(_NotServingSent):
            await super().Watch(request, cast("Context", _WatchContext(self._gate, context)))


class _NotServingSent(Exception):
    """The client of this watch knows that the router drains."""


class _WatchContext:
    """The context of one watch. Raises _NotServingSent after it has written NOT_SERVING."""

    def __init__(self, gate: Gate, context: Context) -> None:
        self._gate = gate
        self._context = context

    async def write(self, answer: health_pb2.HealthCheckResponse) -> None:
        # While this write waits for its client to read, all other watches of the service wait too. So the client has
        # only 30 s.
        call = current_call()
        self._gate.writing(call)
        await self._context.write(answer)
        self._gate.written(call)
        if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            raise _NotServingSent
