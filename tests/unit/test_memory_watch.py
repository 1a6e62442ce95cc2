"""The watcher of a router's memory continues, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncGenerator, Collection, Generator

import pytest

from router.buffer import Buffer
from router.gate import connections, memory_watch
from router.gate.admission import Gate
from router.gate.memory_watch import MemoryWatch
from router.gate.tracing import Tracing
from tests.routers import PATIENCE_S

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
