"""Tests the watcher of a router's memory: which connections it closes, and that it continues even if something
fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proof.hostile_peer import open_peer
from router.buffer import Buffer
from router.gate import connection_limit, connections, memory_watch
from router.gate.admission import RECEIVED_BYTES_MAX, Gate
from router.gate.calls import Methods
from router.gate.connection_limit import ConnectionLimit
from router.gate.memory_watch import MemoryWatch
from router.gate.tracing import Tracing
from router.services.health import HealthService
from tests.routers import PATIENCE_S
from windrow.org_header import ORG_HEADER, VALUE_CHARS_MAX

MIB = 1024 * 1024


@contextlib.contextmanager
def no_more_files() -> Generator[None, None, None]:
    """Uses up the files that this process can open, as if clients had opened too many connections."""
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
        # This call starts the thread now, because it could not start later, without free file descriptors.
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


class Router:
    """A router process that is watched. The test sets its memory and its connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, limit_mib: int) -> None:
        self.resident_mib = 0
        self.held_mib: dict[str, int] = {}
        self.listings = 0
        self.closed: list[str] = []
        self.gate = Gate(Tracing(), Buffer(MIB))
        monkeypatch.setattr(connections, "received_bytes", self._received_bytes)
        monkeypatch.setattr(connections, "hang_up", self._hang_up)
        monkeypatch.setattr(memory_watch, "_give_back_freed", lambda: None)
        self.watch = MemoryWatch(limit_mib * MIB, lambda: self.resident_mib * MIB)

    async def look(self, resident_mib: int) -> list[str]:
        """Looks at the memory. Returns the connections that are closed."""
        self.resident_mib, self.closed = resident_mib, []
        await self.watch._look(self.gate, 1, ())
        return self.closed

    def _received_bytes(self, _: int) -> dict[str, int]:
        self.listings += 1
        return {peer: held * MIB for peer, held in self.held_mib.items()}

    def _hang_up(self, _: int, peers: Collection[str]) -> int:
        self.closed = sorted(peers)
        for peer in peers:
            del self.held_mib[peer]
        return len(peers)


async def test_a_process_above_half_of_its_limit_is_looked_at_more_often_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(monkeypatch, limit_mib=400)
    router.resident_mib = 200
    assert router.watch._pause_s() == memory_watch._LOOK_S == 0.25
    router.resident_mib = 201
    assert router.watch._pause_s() == memory_watch._QUICK_LOOK_S < 0.05
    # As long as the process is below its limit, the watcher does not list the connections.
    assert (await router.look(201), await router.look(400), router.listings) == ([], [], 0)


async def test_connections_are_closed_until_what_they_held_covers_what_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(monkeypatch, limit_mib=400)
    router.held_mib = {"small": 5, "largest": 30, "large": 20}
    assert await router.look(440) == ["large", "largest"]


async def test_while_a_closed_connection_gives_back_its_memory_others_are_closed_only_for_what_comes_on_top(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(monkeypatch, limit_mib=400)
    router.held_mib = {"first": 100, "second": 60, "third": 50, "honest": 5}
    assert await router.look(450) == ["first"]
    assert await router.look(455) == []
    # The process has grown by 70 MiB more, so two more connections are closed.
    assert await router.look(520) == ["second", "third"]
    assert await router.look(440) == []
    # The time in which the closed connections may give back their memory is over, and the process is still too large.
    router.watch._accepted_until_s = 0
    assert await router.look(401) == ["honest"]


async def test_a_process_that_is_too_large_for_another_reason_is_listed_again_only_when_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(monkeypatch, limit_mib=400)
    for _ in range(3):
        assert await router.look(450) == []
    assert router.listings == 1
    router.held_mib = {"new": 40}
    assert await router.look(480) == ["new"]


@contextlib.asynccontextmanager
async def serving(gate: Gate) -> AsyncGenerator[int, None]:
    """Serves the health service behind the gate. Yields the port."""
    methods = Methods(gate)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService([""]), cast("grpc.aio.Server", methods))
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

        # At every moment, the gate handles some calls of this connection. The metadata of all these calls has more than
        # _BLAMED_BYTES in total.
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


async def test_calls_that_anybody_may_make_take_only_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gate.admission.PUBLIC_CALLS_MAX", 4)
    gate = Gate(Tracing(), Buffer(2**30))
    async with serving(gate) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        # One connection may have half of the four places, and has them already.
        refused = stub.Watch(health_pb2.HealthCheckRequest())
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError, match="calls that anybody may make"):
            await stub.Check(health_pb2.HealthCheckRequest())
        for watch in watches:
            watch.cancel()
        async with asyncio.timeout(PATIENCE_S):
            # The places of the connection are free again when the router has seen the cancellations of its calls.
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.Check(health_pb2.HealthCheckRequest())
                    break


async def test_the_watch_and_the_limit_of_connections_go_on_when_threads_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung_up: asyncio.Queue[set[str]] = asyncio.Queue()
    listed: asyncio.Queue[int] = asyncio.Queue()
    failing = {connections.hang_up: 2, connections.received_bytes: 2}

    async def to_thread(act: Callable[..., Any], *arguments: Any) -> Any:
        if failing[act]:
            failing[act] -= 1
            raise RuntimeError("can't start new thread")
        if act is connections.hang_up:
            hung_up.put_nowait(set(arguments[1]))
            return 1
        listed.put_nowait(arguments[0])
        return {}

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    monkeypatch.setattr(memory_watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(connection_limit, "_LOOK_S", 0.01)
    gate, watch = Gate(Tracing(), Buffer(MIB)), MemoryWatch(1 << 60)
    watch.hang_up("first")
    watching = [asyncio.create_task(each.run(gate, 1)) for each in (watch, ConnectionLimit(0))]
    assert await asyncio.wait_for(hung_up.get(), PATIENCE_S) == {"first"}
    assert await asyncio.wait_for(listed.get(), PATIENCE_S) == 1
    assert not any(failing.values())
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)
