"""The standard health service (grpc.health.v1), whose watchers do not hold up a drain."""

from __future__ import annotations

import contextlib
from typing import cast

from grpc_health.v1 import health, health_pb2

from router.gate import Context


class HealthService(health.aio.HealthServicer):
    """Tells those who watch of the drain, and lets them go: a watch has no end of its own."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        with contextlib.suppress(_Told):
            await super().Watch(request, cast("Context", _LastWord(context)))


class _Told(Exception):
    """The watcher knows of the drain."""


class _LastWord:
    """The context of one watch, which ends with NOT_SERVING."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def write(self, answer: health_pb2.HealthCheckResponse) -> None:
        await self._context.write(answer)
        if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            raise _Told
