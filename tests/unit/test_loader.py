"""The importer's loop continues if a job fails, and if a router refuses a call that may succeed later."""

from __future__ import annotations

import asyncio

import pytest
from grpc import StatusCode

from examples.importer import loader
from tests.unit.client_fake import FakeRouter, failing
from windrow import SyncClient, Unauthenticated


def turn(address: str) -> None:
    """Runs the body of the importer's loop once."""
    with SyncClient(address, org="shop", timeout=0.5) as client:
        for job in loader.take(client, "loader", window_s=30.0):
            loader.work(client, job, window_s=30.0, slow_s=0.0)


@pytest.mark.parametrize(
    ("payload", "fault"), [(b'{"feed": "scarves"}', "KeyError"), (b"feed", "JSONDecodeError"), (b"{}", "KeyError")]
)
async def test_a_job_that_cannot_be_worked_is_nacked(router: FakeRouter, payload: bytes, fault: str) -> None:
    job = router.give("import_feed", payload)
    await asyncio.to_thread(turn, router.address)
    ((nack,),) = [request.nacks for request in router.of("Nack")]
    assert (nack.lease, nack.failure.type.rpartition(".")[2]) == (job.lease, fault)
    assert router.of("Ack") == []


@pytest.mark.parametrize(("feed", "verb"), [("ties", "Ack"), ("scarves", "Nack")])
async def test_a_job_whose_outcome_cannot_be_reported_does_not_end_the_loop(
    router: FakeRouter, feed: str, verb: str
) -> None:
    router.give("import_feed", f'{{"feed": "{feed}"}}'.encode())
    router.scripts[verb] = failing(1, StatusCode.RESOURCE_EXHAUSTED, router, verb)
    await asyncio.to_thread(turn, router.address)
    assert len(router.of(verb)) == 1


async def test_a_dequeue_that_fails_is_made_again_unless_trying_does_not_help(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "PAUSE_S", 0.0)
    router.scripts["Dequeue"] = failing(1, StatusCode.RESOURCE_EXHAUSTED, router, "Dequeue")
    await asyncio.to_thread(turn, router.address)
    router.give("import_feed", b'{"feed": "ties"}')
    await asyncio.to_thread(turn, router.address)
    assert len(router.of("Ack")) == 1
    router.scripts["Dequeue"] = failing(1, StatusCode.UNAUTHENTICATED, router, "Dequeue")
    with pytest.raises(Unauthenticated):
        await asyncio.to_thread(turn, router.address)
