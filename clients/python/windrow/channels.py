"""The connections to the routers behind one address. This module opens them, and finds out why they cannot be
opened."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from grpc import aio

from windrow import handshake
from windrow.address import address_fault, split_scheme, stays_here, uses_proxy
from windrow.errors import ClientClosed, InvalidRequest
from windrow.payloads import checked_count
from windrow.tls import Pem, Tls, chosen, credentials, read
from windrow.v1.admin_pb2_grpc import AdminStub
from windrow.v1.cluster_pb2_grpc import ClusterStub
from windrow.v1.queue_pb2_grpc import QueueStub
from windrow.v1.schedules_pb2_grpc import SchedulesStub
from windrow.v1.workflows_pb2_grpc import WorkflowsStub

if TYPE_CHECKING:
    # Only the stub files (.pyi) have these names.
    from windrow.v1.admin_pb2_grpc import AdminAsyncStub
    from windrow.v1.cluster_pb2_grpc import ClusterAsyncStub
    from windrow.v1.queue_pb2_grpc import QueueAsyncStub
    from windrow.v1.schedules_pb2_grpc import SchedulesAsyncStub
    from windrow.v1.workflows_pb2_grpc import WorkflowsAsyncStub

    class Stub(
        QueueAsyncStub,
        AdminAsyncStub,
        ClusterAsyncStub,
        SchedulesAsyncStub,
        WorkflowsAsyncStub,
    ):
        """The methods of the services on one channel."""

        def __init__(self, channel: aio.Channel) -> None: ...
else:

    class Stub(QueueStub, AdminStub, ClusterStub, SchedulesStub, WorkflowsStub):
        def __init__(self, channel):
            QueueStub.__init__(self, channel)
            AdminStub.__init__(self, channel)
            ClusterStub.__init__(self, channel)
            SchedulesStub.__init__(self, channel)
            WorkflowsStub.__init__(self, channel)


# The contract allows requests of 16 MiB; the margin is for the envelope around a request.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
_CHANNEL_BYTES_MAX = MESSAGE_BYTES_MAX + 65536
CHANNELS_MAX = 64
# While a client reaches no router, it looks for a TLS fault at most once every _LOOK_S seconds.
_LOOK_S = 5.0
# This is longer than the longest life of a stream at a router.
_STREAM_S_MAX = 100_000.0

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", _CHANNEL_BYTES_MAX),
    # The caller's request limits the answer's size. If the client refused a large answer, its jobs would stay leased
    # with no consumer.
    ("grpc.max_receive_message_length", -1),
    # Detect within 18 s that a router hangs, so that a call of 30 s has time for another try. Only pings detect this:
    # the kernel still acknowledges packets for a stopped process.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    # Send pings between calls too. Otherwise a NAT or a firewall may forget the connection, and the next call fails.
    ("grpc.keepalive_permit_without_calls", 1),
    # The default of 60 s would override keepalive_timeout_ms.
    ("grpc.http2.ping_timeout_ms", 8_000),
    # By default gRPC sends only one ping a minute after two pings on an idle stream.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also the timeout of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # By default channels to one address share a connection, and a connection reaches only one router process.
    ("grpc.use_local_subchannel_pool", 1),
    # calls.py decides about retries, not a service config from the resolver.
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),
)


# The channels of this process that have been connected and not closed.
_connected: weakref.WeakSet[Channels] = weakref.WeakSet()
# Whether channels were connected in the parent process when it forked this process. If they were, a new channel would
# crash this process or never get an answer, because gRPC's threads end at the fork, and leave their shared state as it
# was.
_is_broken = False
# The time when this process last closed connected channels (monotonic seconds).
_closed_at_s = -math.inf
# After the last channel is closed, gRPC's threads need a moment to end: milliseconds, or more on a busy machine.
_THREADS_END_S_MAX = 1.0
_THREAD = re.compile(rb"event_engine|lifeguard|grpc_|resolver")
_THREAD_NAMES = Path("/proc/self/task")


def _before_fork() -> None:
    """Waits until gRPC's threads have ended, if the last channel has just been closed. Only Linux shows these
    threads."""
    while not _connected and time.monotonic() < _closed_at_s + _THREADS_END_S_MAX and _has_grpc_thread():
        time.sleep(0.001)


def _has_grpc_thread() -> bool:
    for name in _THREAD_NAMES.glob("*/comm"):
        # The thread may have ended meanwhile.
        with contextlib.suppress(OSError):
            if _THREAD.match(name.read_bytes()):
                return True
    return False


def _on_fork() -> None:
    global _is_broken
    _is_broken = _is_broken or bool(_connected)


if sys.platform != "win32":
    os.register_at_fork(before=_before_fork, after_in_child=_on_fork)


class Channels:
    """Connections with the stubs of the services. Calls use the connections in turn. The first call connects them all.
    From then on, the connections belong to the event loop of that first call."""

    def __init__(self, address: str, *, count: int, tls: Tls | Path | str | bool | None, has_token: bool) -> None:
        """`has_token` says that the calls carry a secret, which must not travel in plain text."""
        address, secure = split_scheme(address)
        if fault := address_fault(address):
            raise InvalidRequest(fault)
        checked_count("channels", count, 1, CHANNELS_MAX)
        self.address = address
        self._count = count
        self._tls = chosen(tls, secure=secure)
        if has_token and self._tls is None and tls is not False and not stays_here(address):
            raise InvalidRequest(
                f"the token would go to {address} in plain text: write the address as grpcs://{address}, or set tls= "
                "to the CA of the router's certificate; tls=False allows it"
            )
        # The contents of the TLS files when the client connected.
        self._pem: Pem | None = None
        self._channels: list[aio.Channel] = []
        self._stubs: list[Stub] = []
        self._turn = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self.closed = False
        # The last look for a TLS fault.
        self._looking: asyncio.Future[tuple[str | None, Pem | None]] | None = None
        self._looked_at_s = 0.0
        # Channels whose certificates have been replaced.
        self._leaving: dict[aio.Channel, asyncio.Task[None]] = {}

    def loop(self) -> asyncio.AbstractEventLoop:
        """Returns the running event loop. Connects at the first call. Raises ClientClosed if the running event loop is
        not that of the first call, or if this process was forked while clients were open."""
        if self.closed:
            raise ClientClosed(f"this client of {self.address} is closed; make a new one")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            if _is_broken:
                raise ClientClosed(
                    "this process was forked while its parent had a client open, and gRPC does not work in such a "
                    "process: close every client before the fork, or start processes with spawn or forkserver"
                )
            self._loop = loop
            _connected.add(self)
            self._pid = os.getpid()
            self._connect_all(None if self._tls is None else read(self._tls))
        if self._loop is not loop or self._pid != os.getpid():
            raise ClientClosed(
                f"this client of {self.address} belongs to another event loop or process; "
                "make one for each, or use SyncClient"
            )
        return loop

    def stub(self) -> Stub:
        """Returns the stubs of the next connection. Raises ClientClosed."""
        self.loop()
        self._turn = (self._turn + 1) % self._count
        return self._stubs[self._turn]

    async def close(self) -> bool:
        """Closes the connections. Returns False if the connections belong to another event loop, because only that loop
        can close them. A second close does nothing."""
        self.closed = True
        channels, self._channels, self._stubs = self._channels, [], []
        if self._loop is not asyncio.get_running_loop() or self._pid != os.getpid():
            return False
        for task in self._leaving.values():
            task.cancel()
        for channel in (*channels, *self._leaving):
            await channel.close()
        _connected.discard(self)
        global _closed_at_s
        _closed_at_s = time.monotonic()
        return True

    async def tls_fault(self) -> str | None:
        """Returns why TLS prevents connections, or None if TLS does not prevent them. Connects again if the files have
        changed."""
        now_s = time.monotonic()
        if self._looking is None or now_s - self._looked_at_s >= _LOOK_S:
            self._looked_at_s = now_s
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))
        # Several calls may wait for the same future: the cancellation of one call must not cancel the future.
        fault, pem = await asyncio.shield(self._looking)
        if pem != self._pem and not self.closed:
            loop = asyncio.get_running_loop()
            for channel in self._channels:
                # Let the streams of the old channel continue.
                closing = self._leaving[channel] = loop.create_task(channel.close(_STREAM_S_MAX))
                closing.add_done_callback(partial(self._left, channel))
            self._connect_all(pem)
        return fault

    def _left(self, channel: aio.Channel, _: object) -> None:
        self._leaving.pop(channel, None)

    def _look(self) -> tuple[str | None, Pem | None]:
        pem = self._pem
        if self._tls is not None:
            # The files may be missing for a moment.
            with contextlib.suppress(InvalidRequest):
                pem = read(self._tls)
        return handshake.fault(self.address, self._tls, pem), pem

    def _connect_all(self, pem: Pem | None) -> None:
        self._pem = pem
        self._channels = [self._connect(pem) for _ in range(self._count)]
        self._stubs.clear()
        for channel in self._channels:
            self._stubs.append(Stub(channel))  # pyrefly: ignore[bad-argument-type]

    def _connect(self, pem: Pem | None) -> aio.Channel:
        options: list[tuple[str, int | str]] = [
            *_OPTIONS,
            ("grpc.enable_http_proxy", int(uses_proxy(self.address))),
        ]
        if self._tls is None or pem is None:
            return aio.insecure_channel(self.address, options=options)
        if self._tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        return aio.secure_channel(self.address, credentials(pem), options=options)
