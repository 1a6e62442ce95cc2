"""One router process: a gRPC server over a fleet of shards, from the first connection to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from router import connections
from router.admin_service import AdminService
from router.buffer import Buffer
from router.calls import Methods
from router.errors import CannotListen
from router.fleet import Fleet
from router.gate import CALLS_MAX, STREAMS_MAX, Gate
from router.health_service import HealthService
from router.memory_watch import MemoryWatch
from router.queue_service import QueueService
from router.reloading import Reloading
from router.settings import RouterSettings
from router.tracing import Tracing
from shard.cluster import Cluster
from shard.following import FollowedFile
from windrow.v1 import admin_pb2, queue_pb2

_log = logging.getLogger(__name__)
# Its peer went before the answer was sent: gRPC's own word for that is an error with a traceback.
logging.getLogger("grpc._cython.cygrpc").addFilter(
    lambda record: not record.getMessage().startswith("ExecuteBatchError raised in core")
)

# 1,000 jobs of 16 KiB, or 15 of the largest.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
# How long the watchers of the health service have to hear of a drain.
_TELL_S_MAX = 1.0
SERVICES = (QueueService.service_name, AdminService.service_name)


async def serve(
    file: FollowedFile, cluster: Cluster, settings: RouterSettings, *, listen: str, ready: Callable[[int], None]
) -> None:
    """Serves on `listen` until SIGTERM or SIGINT, then lets calls in flight end. Calls `ready` with the port once
    it takes calls. `cluster` and `settings` are what the file said; its changes are taken up when they are noticed, at
    once on SIGHUP. Raises CannotListen, shard.errors.Misconfigured."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, file.hurry)
    tracing = Tracing()
    tracing.start()
    try:
        async with _open(Fleet(cluster, connections_per_shard=settings.connections_per_shard), stop) as fleet:
            if stop.is_set():
                return
            reloading = Reloading(file, cluster, settings, fleet)
            watch = MemoryWatch(settings.watched_bytes)
            gate = Gate(tracing, Buffer(settings.buffer_bytes), watch.hang_up)
            queue, checks, server = _server(fleet, reloading, gate, settings)
            try:
                port = server.add_insecure_port(listen)
            except RuntimeError as error:
                raise CannotListen(f"cannot listen on {listen}: {error}") from error
            await server.start()
            for service in (health.OVERALL_HEALTH, *SERVICES):
                await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
            ready(port)
            async with _beside(watch.run(gate, port)):
                async with _beside(reloading.run()):
                    await stop.wait()
                _log.info("draining: calls in flight have %g s", settings.drain_seconds)
                connections.stop_listening(port)
                # A watcher that does not read holds this up.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TELL_S_MAX):
                        await checks.enter_graceful_shutdown()
                queue.drain()
                gate.drain()
                for peer in connections.peers(port) - gate.inside.keys():
                    watch.hang_up(peer)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(settings.drain_seconds):
                        await gate.empty()
            # A call that comes while gRPC stops is told that it was CANCELLED. Without its connection its client sees
            # UNAVAILABLE, and goes elsewhere.
            connections.hang_up(port, connections.peers(port))
            await server.stop(None)
            await fleet.finish()
    finally:
        tracing.close()


@contextlib.asynccontextmanager
async def _open(fleet: Fleet, stop: asyncio.Event) -> AsyncGenerator[Fleet, None]:
    """The fleet, open and kept up within this scope; given up on early when `stop` is set. Its failure sets `stop`,
    and is raised at the end."""
    opened = asyncio.Event()
    keeper = asyncio.create_task(fleet.run(opened))
    keeper.add_done_callback(lambda _: stop.set())
    first = asyncio.create_task(opened.wait())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({first, stopped}, return_when=asyncio.FIRST_COMPLETED)
        yield fleet
    finally:
        for task in (first, stopped, keeper):
            task.cancel()
        await asyncio.wait({first, stopped, keeper})
        if not keeper.cancelled():
            keeper.result()


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None, None]:
    """Runs something until the end of the scope."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def _server(
    fleet: Fleet, reloading: Reloading, gate: Gate, settings: RouterSettings
) -> tuple[QueueService, HealthService, grpc.aio.Server]:
    methods = Methods(gate)
    queue, checks = QueueService(fleet, gate), HealthService()
    methods.add(queue, queue_pb2.DESCRIPTOR.services_by_name["Queue"])
    methods.add(AdminService(fleet, reloading), admin_pb2.DESCRIPTOR.services_by_name["Admin"])
    # The generated code adds their methods one by one, as it would to a server.
    to_methods = cast("grpc.aio.Server", methods)
    health_pb2_grpc.add_HealthServicer_to_server(checks, to_methods)
    reflected = reflection.aio.ReflectionServicer((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, to_methods)  # type: ignore[no-untyped-call]
    server = grpc.aio.server(
        handlers=(methods,),
        options=[
            # Several processes serve one port; the kernel deals the connections out.
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", -1),
            # Calls that were reset count too until they have ended here. Without a bound, a client that opens and
            # resets calls would fill the event loop.
            ("grpc.max_concurrent_streams", settings.calls_per_connection),
            # A stream that nobody reads takes in 64 KiB. With probes of the bandwidth it would be up to 16 MiB.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.server_handshake_timeout_ms", 10_000),
            # Who gets in, the gate says. By default gRPC refuses calls at random, whosever they are, when 1,000 have
            # come at once, and tells them CANCELLED.
            ("grpc.server.max_pending_requests", CALLS_MAX + STREAMS_MAX),
            ("grpc.server.max_pending_requests_hard_limit", 2 * (CALLS_MAX + STREAMS_MAX)),
            # A client that vanished without a word is noticed, and its streams end.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            # Without it a ping has 60 s, whatever keepalive_timeout_ms says.
            ("grpc.http2.ping_timeout_ms", 10_000),
            # Clients send one every 10 s (windrow/calls.py).
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    return queue, checks, server
