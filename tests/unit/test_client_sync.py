"""The client without await: the same answers and errors, from any thread and while an event loop runs."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
from grpc import StatusCode

from tests.unit.client_fake import WAIT_S, FakeRouter, failing, fake_router
from windrow import (
    Answer,
    Client,
    ClientClosed,
    Enqueued,
    Job,
    NewJob,
    PermissionDenied,
    SyncClient,
    sync_client,
    uuid7,
)
from windrow.client import CallNext


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with fake_router() as running:
        yield running


async def test_every_verb_answers_as_the_asyncio_client_does(router: FakeRouter) -> None:
    router.give("k", b"p")

    def use() -> None:
        with SyncClient(router.address, org="acme") as client:
            assert client.enqueue("q", "k", {"a": 1}).duplicate is False
            assert len(client.enqueue_many([NewJob("q", "k"), NewJob("q", "k")])) == 2
            (job,) = client.dequeue(["q"], max_jobs=5, wait=2)
            assert job.payload == b"p"
            assert client.extend(job) is Answer.OK
            assert client.ack(job, result="done") is Answer.OK
            assert client.nack([job], error="e") == [Answer.OK]
            assert client.release([job, job]) == [Answer.OK] * 2
            assert client.snooze([job, job], after=60, reason="not yet") == [Answer.OK] * 2
            assert client.get_jobs([job.id]) == {}
            assert client.cancel_jobs([job.id]) == [Answer.OK]
            assert client.server_info().version == "0.0.1"

    await asyncio.to_thread(use)
    assert len(set(router.peers)) == 1
    assert router.of("Dequeue")[0].wait.seconds == 2


def test_every_call_of_the_asyncio_client_is_there() -> None:
    calls = [name for name, _ in inspect.getmembers(Client, inspect.iscoroutinefunction) if name[0] != "_"]
    iterators = [name for name, _ in inspect.getmembers(Client, inspect.isasyncgenfunction) if name[0] != "_"]
    # These methods take prepared requests, which only asyncio programs have.
    missing = [name for name in (*calls, *iterators) if not hasattr(SyncClient, name)]
    assert missing == ["send", "send_together"]


async def test_errors_come_through(router: FakeRouter) -> None:
    router.scripts["Ack"] = failing(1, StatusCode.PERMISSION_DENIED, router, "Ack")

    def use() -> None:
        with SyncClient(router.address, org="acme") as client, pytest.raises(PermissionDenied):
            client.ack(Job(lease=b"l"))

    await asyncio.to_thread(use)


async def test_clients_of_other_orgs_share_its_connection_and_thread(router: FakeRouter) -> None:
    def use() -> list[str]:
        with SyncClient(router.address, org="acme") as client:
            other = client.for_org("globex").for_org("initech")
            with client.for_org("globex") as closed:
                closed.enqueue("q", "k")
            other.enqueue("q", "k")
            client.enqueue("q", "k")
            threads = [thread.name for thread in threading.enumerate()]
        with pytest.raises(ClientClosed, match="is closed"):
            other.enqueue("q", "k")
        return threads

    assert (await asyncio.to_thread(use)).count("windrow-sync-client") == 1
    assert [request.org for request in router.of("Enqueue")] == ["globex", "initech", "acme"]
    assert len(set(router.peers)) == 1


async def test_many_threads_share_one(router: FakeRouter) -> None:
    client = SyncClient(router.address, org="acme")

    def use() -> None:
        for _ in range(20):
            client.enqueue("q", "k")

    await asyncio.gather(*(asyncio.to_thread(use) for _ in range(8)))
    await asyncio.to_thread(client.close)
    ids = [job.id for request in router.of("Enqueue") for job in request.jobs]
    assert len(ids) == len(set(ids)) == 160
    # Threads that enqueue at the same time share calls.
    assert len(router.of("Enqueue")) < 160


async def test_a_closed_one_says_so_and_leaves_no_thread(router: FakeRouter) -> None:
    client = SyncClient(router.address, org="acme")
    await asyncio.to_thread(client.enqueue, "q", "k")
    await asyncio.to_thread(client.close)
    client.close()
    assert "windrow-sync-client" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ClientClosed, match="is closed"):
        client.enqueue("q", "k")


async def test_a_call_that_hangs_in_middleware_ends_when_another_thread_closes_the_client(router: FakeRouter) -> None:
    begun = threading.Event()

    async def hang(jobs: Sequence[NewJob], call_next: CallNext) -> list[Enqueued]:
        begun.set()
        await asyncio.Event().wait()
        return await call_next(jobs)

    client = SyncClient(router.address, org="acme", middleware=[hang])
    call = asyncio.create_task(asyncio.to_thread(client.enqueue, "q", "k"))
    await asyncio.to_thread(begun.wait, WAIT_S)
    await asyncio.to_thread(client.close)
    with pytest.raises(ClientClosed, match="closed before its call ended"):
        async with asyncio.timeout(WAIT_S):
            await call
    assert "windrow-sync-client" not in {thread.name for thread in threading.enumerate()}


async def test_a_call_that_pauses_before_its_next_try_ends_when_another_thread_closes_the_client(
    router: FakeRouter,
) -> None:
    router.scripts["GetJobs"] = failing(1, StatusCode.UNAVAILABLE, router, "GetJobs", retry_after_s=15)
    client = SyncClient(router.address, org="acme")
    call = asyncio.create_task(asyncio.to_thread(client.for_org("globex").get_jobs, [uuid7()]))
    # The client sets `_heard` just before its pause.
    await router.until(lambda: client._client.calls._heard)
    await asyncio.to_thread(client.close)
    with pytest.raises(ClientClosed, match="the client was closed meanwhile"):
        async with asyncio.timeout(WAIT_S / 2):
            await call
    assert "windrow-sync-client" not in {thread.name for thread in threading.enumerate()}


async def test_a_close_that_middleware_holds_up_ends_without_an_error(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_client, "_CLOSE_S", 0.01)
    begun, go = threading.Event(), threading.Event()

    async def block(jobs: Sequence[NewJob], call_next: CallNext) -> list[Enqueued]:
        begun.set()
        go.wait(WAIT_S)
        return await call_next(jobs)

    client = SyncClient(router.address, org="acme", middleware=[block])
    call = asyncio.create_task(asyncio.to_thread(client.enqueue, "q", "k"))
    await asyncio.to_thread(begun.wait, WAIT_S)
    thread = client._thread
    await asyncio.to_thread(client.close)
    go.set()
    with pytest.raises(ClientClosed):
        async with asyncio.timeout(WAIT_S):
            await call
    assert thread is not None
    await asyncio.to_thread(thread.join, WAIT_S)
    assert not thread.is_alive()


async def test_every_thread_that_uses_a_client_while_it_is_closed_is_told_so(router: FakeRouter) -> None:
    told: list[ClientClosed] = []

    def use(client: SyncClient) -> None:
        try:
            while True:
                client.server_info()
        except ClientClosed as error:
            told.append(error)

    for _ in range(10):
        router.requests.clear()
        client = SyncClient(router.address, org="acme")
        threads = [threading.Thread(target=use, args=(client,), daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        await router.until(lambda: len(router.requests) > 8)
        await asyncio.to_thread(client.close)
        for thread in threads:
            await asyncio.to_thread(thread.join, WAIT_S)
    assert len(told) == 10 * 8


async def test_a_middleware_that_raises_system_exit_ends_only_its_own_call(router: FakeRouter) -> None:
    async def leave(jobs: Sequence[NewJob], call_next: CallNext) -> list[Enqueued]:
        raise SystemExit(4)

    def use() -> None:
        with SyncClient(router.address, org="acme", middleware=[leave]) as client:
            with pytest.raises(SystemExit):
                client.enqueue("q", "k")
            assert client.server_info().version == "0.0.1"

    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(use)


async def test_a_signal_handler_may_use_the_client_that_it_interrupts(router: FakeRouter) -> None:
    """The signal handler runs in the middle of a call, in the thread of the call."""
    client = SyncClient(router.address, org="acme")

    def use() -> None:
        with client, client._lock:
            client.enqueue("q", "k")

    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(use)
    assert len(router.of("Enqueue")) == 1


async def lines_of(program: str, router: FakeRouter, *, within_s: float) -> list[str]:
    """Runs a program that uses a client of this router. Returns the lines that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, router.address, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode().splitlines()


LEFT_OPEN = """
import sys
import windrow

class Holder:
    def __init__(self):
        self.client = windrow.SyncClient(sys.argv[1], org="acme")
        self.client.enqueue("q", "k")

    def __del__(self):
        assert sys.is_finalizing()
        try:
            self.client.enqueue("q", "k")
        except windrow.ClientClosed as error:
            print(error, flush=True)
        self.client.close()
        print("closed", flush=True)

# Modules are cleared last, when the client's thread has ended.
sys.modules["holder"] = Holder()
"""


async def test_a_client_that_is_used_and_closed_while_the_interpreter_shuts_down_does_not_hang(
    router: FakeRouter,
) -> None:
    refused, closed = await lines_of(LEFT_OPEN, router, within_s=WAIT_S)
    assert "the interpreter shuts down" in refused
    assert closed == "closed"


def test_it_works_where_a_loop_is_running_in_the_calling_thread() -> None:
    """A cell of a notebook is an example: a loop runs in the thread that makes the call."""
    addresses: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with fake_router() as router:
            addresses.append(router.address)
            ready.set()
            await asyncio.to_thread(done.wait)

    server = threading.Thread(target=asyncio.run, args=(serve(),))
    server.start()
    ready.wait()

    async def cell() -> str:
        with SyncClient(addresses[0], org="acme") as client:
            return client.enqueue("q", "k").id

    try:
        assert asyncio.run(cell())
    finally:
        done.set()
        server.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
async def test_a_forked_process_is_asked_to_make_its_own_client(router: FakeRouter) -> None:
    client = SyncClient(router.address, org="acme")
    # This looks as if the parent process had used the client.
    client._pid = os.getpid() - 1
    with pytest.raises(ClientClosed, match="before a fork"):
        client.enqueue("q", "k")


FORKS = """
import os, sys
import windrow

def enqueue():
    with windrow.SyncClient(sys.argv[1], org="acme", timeout=10) as client:
        return client.enqueue("q", "k").duplicate

def in_child():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = str(enqueue())
        except windrow.ClientClosed as error:
            told = str(error)
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    print(os.read(read, 1000).decode())

with windrow.SyncClient(sys.argv[1], org="acme") as client:
    client.enqueue("q", "k")
    in_child()
    print(client.enqueue("q", "k").duplicate)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
async def test_a_process_that_was_forked_while_a_client_was_open_is_told_so(router: FakeRouter) -> None:
    """In the forked process, gRPC would crash or never answer."""
    child, parent = await lines_of(FORKS, router, within_s=2 * WAIT_S)
    assert "close every client before the fork" in child
    assert parent == "False"


FORKS_UNUSED = """
import os, sys
import windrow

client = windrow.SyncClient(sys.argv[1], org="acme", timeout=10)
for _ in range(2):
    child = os.fork()
    if child == 0:
        with client:
            print(client.enqueue("q", "k").duplicate, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
with client:
    print(client.enqueue("q", "k").duplicate)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
async def test_a_client_that_nobody_has_used_works_in_every_process_that_is_forked(router: FakeRouter) -> None:
    """For example, with `gunicorn --preload` the parent process imports the module that makes the client."""
    assert await lines_of(FORKS_UNUSED, router, within_s=2 * WAIT_S) == ["False"] * 3


FORKS_AT_ONCE = """
import os, sys, threading
import windrow

def linger():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
        name.write("grpc_shutdown")
    lingering.set()
    threading.Event().wait(0.2)
    ended.append(True)

lingering, ended = threading.Event(), []
with windrow.SyncClient(sys.argv[1], org="acme") as client:
    client.enqueue("q", "k")
threading.Thread(target=linger).start()
lingering.wait()
child = os.fork()
if child == 0:
    print(bool(ended), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells which threads there are")
async def test_a_fork_after_a_close_waits_for_grpcs_last_threads(router: FakeRouter) -> None:
    """If a process is forked while gRPC's threads end, the calls of the new process may never end."""
    assert await lines_of(FORKS_AT_ONCE, router, within_s=2 * WAIT_S) == ["True"]
