"""One router process: a gRPC server over a fleet of shards, from the first connection to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from router.buffer import Buffer
from router.codec.scaler import org_named
from router.fleet import shard_gauges, shard_signals
from router.fleet.fleet import Fleet
from router.fleet.reload import Reloader
from router.gate import connections
from router.gate.admission import CALLS_MAX, METADATA_BYTES_MAX, RECEIVED_BYTES_MAX, Gate
from router.gate.audit import Audit
from router.gate.auth.api_keys import ApiKeys
from router.gate.auth.authenticator import Authenticator
from router.gate.auth.settings import AuthSettings, auth_settings
from router.gate.calls import Methods
from router.gate.connection_limit import ConnectionLimit, accepted_max, allow_files
from router.gate.memory_watch import MemoryWatch
from router.gate.tracing import Tracing
from router.keda import externalscaler_pb2
from router.process.grpc_server import GrpcServer
from router.process.upkeep import Upkeep
from router.services.admin import AdminService
from router.services.cluster import ClusterService
from router.services.external_scaler import ExternalScalerService
from router.services.health import HealthService
from router.services.queue import QueueService
from router.services.schedules import SchedulesService
from router.services.workflows import WorkflowsService
from router.settings import END_S_MAX, RouterSettings
from router.tls_settings import TlsSettings, tls_settings
from shard.admin import audit as audit_log
from shard.placement.cluster_file import Cluster
from shard.placement.file_watcher import WatchedFile
from windrow.v1 import admin_pb2, cluster_pb2, queue_pb2, schedules_pb2, workflows_pb2

if TYPE_CHECKING:
    from router.process.certificates import Certificates

_log = logging.getLogger(__name__)
# gRPC logs an error with a traceback whenever a client leaves before its answer was sent, and whenever metadata is not
# UTF-8. The second error contains the value of the metadata, which may be a token. With both errors, strangers could
# fill the log. Drop both.
logging.getLogger("grpc._cython.cygrpc").addFilter(
    lambda record: not str(record.msg).startswith(("ExecuteBatchError raised in core", "Invalid encoding on"))
)

# How long gRPC may take to end the calls that still run after the drain.
_STOP_S_MAX = 2.0
# How much of END_S_MAX is left for the connections to databases and for spans, which are closed last.
_CLOSE_S_MAX = 6.0
SERVICES = (
    QueueService.service_name,
    AdminService.service_name,
    ClusterService.service_name,
    SchedulesService.service_name,
    WorkflowsService.service_name,
    ExternalScalerService.service_name,
)


async def serve(
    file: WatchedFile,
    cluster: Cluster,
    settings: RouterSettings,
    *,
    supervisor: socket.socket,
    listen: str,
    ready: Callable[[int], None],
) -> None:
    """Serves on `listen` until SIGTERM or SIGINT, then lets calls in flight end.

    Calls `ready` with the port once the process takes calls. `cluster` and `settings` are the first contents of `file`;
    later changes of `file`, and changes of the TLS files, are applied when they are noticed, or at once on SIGHUP. Over
    the connection `supervisor`, this process receives its connections to the sibling processes. When the supervisor
    ends, this process stops as on SIGTERM. It also stops if a task of its upkeep fails, and then raises the task's
    error. After the drain it ends within END_S_MAX. Raises CannotListen, ClusterFileError, shard.errors.Misconfigured.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    certificates = _certificates(tls_settings(cluster))
    loop.add_signal_handler(signal.SIGHUP, _hurry, file, certificates)
    tracing = Tracing()
    tracing.start()
    try:
        buffer = Buffer(settings.buffer_bytes)
        fleet = Fleet(
            cluster,
            connections_per_shard=settings.connections_per_shard,
            sweep_s=settings.sweep_seconds,
            buffer=buffer,
        )
        loop.add_reader(supervisor, _hear, supervisor, fleet, stop)
        async with _open(fleet, stop):
            if stop.is_set():
                return
            reloader = Reloader(file, cluster, settings, fleet, auth_settings)
            watch = MemoryWatch(settings.watched_bytes)
            connections_max = allow_files(settings.client_connections)
            authenticator = _authenticator(auth_settings(cluster), fleet)
            audit = Audit(fleet.catalog_database) if audit_log.is_on(cluster) else None
            gate = Gate(tracing, buffer, watch.hang_up, authenticator, audit)
            queue, scaler, checks, server = _server(fleet, reloader, gate, settings, connections_max)
            port = server.listen(listen, None if certificates is None else certificates.credentials())
            await server.start()
            ready(port)
            async with Upkeep(stop) as upkeep:
                upkeep.begin(watch.run(gate, port))
                upkeep.begin(ConnectionLimit(connections_max).run(gate, port))
                upkeep.begin(shard_signals.record(fleet))
                if authenticator is not None:
                    upkeep.begin(authenticator.run())
                if audit is not None:
                    upkeep.begin(audit.run())
                if certificates is not None:
                    upkeep.begin(certificates.run())
                # The variable is set if metrics are served (router/process/metrics.py).
                if (folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR")) is not None:
                    upkeep.begin(shard_gauges.record(fleet, Path(folder), named_max=settings.metrics_queues))
                async with Upkeep(stop) as until_drain:
                    until_drain.begin(reloader.run())
                    until_drain.begin(_end_with(server))
                    await stop.wait()
                end_s = loop.time() + settings.drain_seconds + END_S_MAX - _CLOSE_S_MAX
                _log.info("draining: calls in flight have %g s", settings.drain_seconds)
                connections.stop_listening(port)
                checks.drain()
                queue.drain()
                scaler.drain()
                gate.drain()
                for peer in connections.peers(port) - gate.arrivals.inside.keys():
                    watch.hang_up(peer)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(settings.drain_seconds):
                        await gate.empty()
            # While gRPC stops, it answers a new call with CANCELLED. If the call's connection is closed instead, the
            # client sees UNAVAILABLE and tries another router.
            connections.hang_up(port, connections.peers(port))
            await _finish(server, audit, fleet, end_s)
            until_drain.check()
            upkeep.check()
    finally:
        tracing.close()


def _certificates(settings: TlsSettings | None) -> Certificates | None:
    if settings is None:
        return None
    # Imported only if it is used: cryptography takes a tenth of a router's start-up time.
    from router.process.certificates import Certificates

    return Certificates(settings)


def _hurry(file: WatchedFile, certificates: Certificates | None) -> None:
    file.hurry()
    if certificates is not None:
        certificates.hurry()


def _hear(supervisor: socket.socket, fleet: Fleet, stop: asyncio.Event) -> None:
    """Reads from the supervisor, which has passed on the connection to a sibling process, or has ended."""
    said, received, _, _ = socket.recv_fds(supervisor, 1, 1)
    for descriptor in received:
        # Unlike the descriptors that Python opens, this one would stay open in programs that this process starts.
        os.set_inheritable(descriptor, False)
        fleet.siblings.connect(socket.socket(fileno=descriptor))
    if not said:
        asyncio.get_running_loop().remove_reader(supervisor)
        stop.set()


@contextlib.asynccontextmanager
async def _open(fleet: Fleet, stop: asyncio.Event) -> AsyncGenerator[Fleet, None]:
    """Opens the fleet and keeps it up within this scope. Yields early if `stop` is set. An error of the fleet sets
    `stop`, and is raised at the end of the scope."""
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


def _authenticator(settings: AuthSettings | None, fleet: Fleet) -> Authenticator | None:
    if settings is None:
        return None
    # Imported only if they are used, as in _certificates().
    from router.gate.auth.certificates import ClientCertificates
    from router.gate.auth.jwt_tokens import jwt_tokens

    return Authenticator(
        api_keys=ApiKeys(fleet, trusted_s=settings.api_keys_trusted_seconds) if settings.api_keys else None,
        jwt=None if settings.jwt is None else jwt_tokens(settings.jwt),
        certificates=ClientCertificates(settings.certificates) if settings.certificates else None,
    )


async def _end_with(server: GrpcServer) -> None:
    """Waits until the server ends by itself. Raises no error then, because another process can take the calls."""
    try:
        await server.ended()
    except Exception:  # noqa: BLE001 - whatever it was, this process serves no more calls
        _log.exception("the gRPC server has ended")


async def _finish(server: GrpcServer, audit: Audit | None, fleet: Fleet, end_s: float) -> None:
    """Stops the server. Then writes the rest of the audit log, hands over what siblings still wait for, gives unused
    tokens back, and waits for the calls of the shards. Gives up at `end_s`, by the event loop's clock."""
    try:
        async with asyncio.timeout_at(end_s):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S_MAX):
                    await server.stop()
            if audit is not None:
                await audit.finish()
            await fleet.siblings.finish()
            await fleet.finish()
    except TimeoutError:
        _log.warning("this process ends before it has given back all tokens and ended all calls of its shards")


def _server(
    fleet: Fleet, reloader: Reloader, gate: Gate, settings: RouterSettings, connections_max: int
) -> tuple[QueueService, ExternalScalerService, HealthService, GrpcServer]:
    methods = Methods(gate)
    queue = QueueService(fleet, gate, stream_s_max=settings.stream_s_max)
    checks = HealthService((health.OVERALL_HEALTH, *SERVICES))
    methods.add(queue, queue_pb2.DESCRIPTOR.services_by_name["Queue"])
    methods.add(AdminService(fleet, gate.buffer), admin_pb2.DESCRIPTOR.services_by_name["Admin"])
    methods.add(ClusterService(fleet, reloader), cluster_pb2.DESCRIPTOR.services_by_name["Cluster"])
    methods.add(SchedulesService(fleet), schedules_pb2.DESCRIPTOR.services_by_name["Schedules"])
    methods.add(WorkflowsService(fleet), workflows_pb2.DESCRIPTOR.services_by_name["Workflows"])
    scaler = ExternalScalerService(fleet, gate, stream_s_max=settings.stream_s_max)
    methods.add(scaler, externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"], org_named)
    # The generated code of these services adds handlers to a server; `methods` takes the server's place.
    to_methods = cast("grpc.aio.Server", methods)
    health_pb2_grpc.add_HealthServicer_to_server(checks, to_methods)
    reflected = reflection.aio.ReflectionServicer((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, to_methods)  # type: ignore[no-untyped-call]
    # The installed library only has v1alpha. The messages of v1 are the same on the wire.
    methods.also_as(reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
    server = GrpcServer(
        methods,
        methods.names,
        options=[
            # Several processes serve one port; the kernel distributes the connections.
            ("grpc.so_reuseport", 1),
            # gRPC receives larger messages than the contract allows, so that the gate can refuse them with an error
            # that names the cause. gRPC itself would end the call with RESOURCE_EXHAUSTED, and a consumer would think
            # that the router is full.
            ("grpc.max_receive_message_length", RECEIVED_BYTES_MAX),
            ("grpc.max_send_message_length", -1),
            # A token has up to 8 KiB. By default gRPC refuses some of the calls with 8 to 16 KiB of metadata, at
            # random.
            ("grpc.max_metadata_size", METADATA_BYTES_MAX),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
            # How long a client may take to acknowledge the settings of HTTP/2: the largest size of metadata, and the
            # largest number of streams.
            ("grpc.http2.settings_timeout", 10_000),
            # No compression: a message of 16 KiB could become one of 16 MiB. The memory watch, which compares the sizes
            # of messages with the bytes received by sockets, would find that such a connection has delivered far more
            # bytes than it sent.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.max_allowed_incoming_connections", accepted_max(connections_max)),
            # A reset call counts until its task in this process has ended. Without this limit, a client that opens and
            # resets calls would flood the event loop.
            ("grpc.max_concurrent_streams", settings.calls_per_connection),
            # Without bandwidth probes, gRPC buffers up to 64 KiB of a stream that this process does not read; with
            # them, up to 16 MiB.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.server_handshake_timeout_ms", 10_000),
            # At this age, with a jitter of 10 %, gRPC sends GOAWAY: the client makes its next calls on a new
            # connection, which the kernel or a load balancer may give to another router. After the grace, gRPC breaks
            # calls that still run.
            ("grpc.max_connection_age_ms", round(settings.connection_age_seconds * 1000)),
            ("grpc.max_connection_age_grace_ms", round(settings.connection_grace_s * 1000)),
            # The gate decides which calls to refuse. But calls that it has not seen yet are in memory with their
            # metadata. If there are more of these calls than the first number, gRPC refuses some of them at random with
            # CANCELLED; if there are more than the second number, it refuses all further ones. The defaults are 1,000
            # and 3,000.
            ("grpc.server.max_pending_requests", CALLS_MAX // 2),
            ("grpc.server.max_pending_requests_hard_limit", CALLS_MAX),
            # Pings find clients that have vanished without closing their connections, so that their streams end.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            # Without this option a ping times out after 60 s, whatever keepalive_timeout_ms is.
            ("grpc.http2.ping_timeout_ms", 10_000),
            # Clients send a ping every 10 s (windrow/channels.py).
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    return queue, scaler, checks, server
