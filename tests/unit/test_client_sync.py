"""The client without await: the same answers and errors, from any thread and while an event loop runs."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator

import pytest
from grpc import StatusCode

from tests.unit.client_fake import FakeRouter, failing, fake_router
from windrow import Answer, Client, ClientClosed, Job, NewJob, PermissionDenied, SyncClient


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
    # These take prepared requests, which only asyncio programs have.
    assert [name for name in calls if not hasattr(SyncClient, name)] == ["send", "send_together"]


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


def test_it_works_where_a_loop_is_running_in_the_calling_thread() -> None:
    """A loop runs in the calling thread, as in a notebook's cell."""
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
    client._pid -= 1
    with pytest.raises(ClientClosed, match="before a fork"):
        client.enqueue("q", "k")
