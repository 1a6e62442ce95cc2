"""The watcher of a router's memory continues, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncGenerator, Collection, Generator
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proof.hostile_peer import open_peer
from router.buffer import Buffer
from router.gate import connections, memory_watch
from router.gate.admission import RECEIVED_BYTES_MAX, Gate
from router.gate.calls import Methods
from router.gate.memory_watch import MemoryWatch
from router.gate.tracing import Tracing
from router.services.health import HealthService
from tests.routers import PATIENCE_S
from windrow.org_header import ORG_HEADER, VALUE_CHARS_MAX

MIB = 1024 * 1024


@contextlib.contextmanager
def no_more_files() -> Generator[None, None, None]:
    """This process can open no more files, as if clients had opened too many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


@contextlib.asynccontextmanager
async def connected() -> AsyncGenerator[tuple[int, str, asyncio.StreamReader], None]:
    """Opens a connection. Yields the server's port, the peer's name, and the peer's socket."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    host, own = writer.get_extra_info("sockname")
    await accepted
    try:
        yield port, f"ipv4:{host}:{own}", reader
    finally:
        writer.close()
        accepted.result().close()
        server.close()


async def test_a_peer_is_hung_up_where_no_more_files_can_be_opened() -> None:
    async with connected() as (port, peer, reader):
        watch = MemoryWatch(1 << 60)
        # Starting a thread opens files.
        await asyncio.to_thread(connections.peers, port)
        with no_more_files():
            watching = asyncio.create_task(watch.run(Gate(Tracing(), Buffer(MIB)), port))
            try:
                watch.hang_up(peer)
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
                assert not watching.done()
            finally:
                watching.cancel()
                await asyncio.wait({watching})


async def test_a_look_that_fails_is_followed_by_others_and_forgets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    hung_up: asyncio.Queue[set[str]] = asyncio.Queue()
    failures = iter([OSError("no"), OSError("no more")])

    def hang_up(_: int, peers: Collection[str]) -> int:
        for error in failures:
            raise error
        hung_up.put_nowait(set(peers))
        return len(peers)

    monkeypatch.setattr(connections, "hang_up", hang_up)
    monkeypatch.setattr(memory_watch, "_LOOK_S", 0.01)
    watch = MemoryWatch(1 << 60)
    watch.hang_up("first")
    watching = asyncio.create_task(watch.run(Gate(Tracing(), Buffer(MIB)), 1))
    assert await asyncio.wait_for(hung_up.get(), PATIENCE_S) == {"first"}
    watching.cancel()
    await asyncio.wait({watching})


@contextlib.asynccontextmanager
async def serving(gate: Gate) -> AsyncGenerator[int, None]:
    """Serves the health service behind the gate. Yields the port."""
    methods = Methods(gate)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(), cast("grpc.aio.Server", methods))
    options = [("grpc.max_receive_message_length", RECEIVED_BYTES_MAX), ("grpc.http2.bdp_probe", 0)]
    server = grpc.aio.server(handlers=(methods,), options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def test_a_connection_whose_calls_have_long_metadata_is_not_blamed_for_what_another_one_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(memory_watch, "_LIST_EVERY", 100)
    monkeypatch.setattr(memory_watch, "_HANDED_OVER_S", 0.0)
    gate = Gate(Tracing(), Buffer(MIB))
    watch = MemoryWatch(1 << 60)
    metadata = ((ORG_HEADER, "o" * VALUE_CHARS_MAX),)

    async with serving(gate) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watching = asyncio.create_task(watch.run(gate, port))
        stub = cast("Any", health_pb2_grpc.HealthStub(channel))

        async def use(count: int) -> None:
            for _ in range(count):
                await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=PATIENCE_S)

        # Some of its calls are always inside, and their metadata is more than a connection may seem to hold.
        await asyncio.gather(*(use(750) for _ in range(4)))
        ((honest, received),) = connections.received_bytes(port).items()
        assert received > 3_000 * VALUE_CHARS_MAX > memory_watch._BLAMED_BYTES
        async with open_peer(f"127.0.0.1:{port}") as hostile:
            await hostile.begin("/grpc.health.v1.Health/Check", 3 * MIB)
            await hostile.heard()
            # From now on the process is above its limit.
            watch._limit_bytes = 0
            await hostile.until(lambda _: hostile.closed, within_s=PATIENCE_S)
            await use(1)
            assert honest in connections.peers(port)
        watching.cancel()
        await asyncio.wait({watching})
