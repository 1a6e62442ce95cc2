"""The standard health service (grpc.health.v1). Its watches end when the router drains, so that they do not delay the
drain. The library has such a service too, but in that service, a watch whose client does not read delays all other
watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.gate.admission import Context

_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):
    """Serves `services`, the names that callers may ask for, until `drain`."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Makes all health checks say from now on that this router serves nothing."""
        self._draining.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Response:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Response(status=_Response.NOT_SERVING if self._draining.is_set() else _Response.SERVING)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> AsyncGenerator[_Response, None]:
        del context
        if not self._draining.is_set():
            known = request.service in self._services
            yield _Response(status=_Response.SERVING if known else _Response.SERVICE_UNKNOWN)
            await self._draining.wait()
        yield _Response(status=_Response.NOT_SERVING)
