"""Retries, deadlines, connections and errors of the client, against a router that fails on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest
from grpc import StatusCode

import windrow
from tests.routers import reserved_address
from tests.unit.client_fake import WAIT_S, FakeRouter, failing, fake_router, invalid, refuse
from windrow import (
    AlreadyExists,
    Answer,
    Client,
    ClientClosed,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidJob,
    InvalidRequest,
    Job,
    JobFilter,
    JobState,
    LimitMeasure,
    NewJob,
    Nodes,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    RouterError,
    RouterTooOld,
    Stats,
    Unauthenticated,
    Unavailable,
    Violation,
    WindrowError,
    Worker,
    WorkflowNode,
    channels,
    uuid7,
)
from windrow.calls import ADMIN_FINAL, FINAL, CallFailure, patient_pause_s, pause_s
from windrow.v1 import admin_pb2, job_pb2, queue_pb2, workflows_pb2

# The header of an HTTP/2 frame of the type PING that is no answer.
PING = bytes.fromhex("000008 06 00 00000000")


def failure(code: StatusCode, retry_after_s: float | None = None) -> CallFailure:
    return CallFailure(code=code, message="no", retry_after_s=retry_after_s)


def test_pauses_grow_to_two_seconds_with_full_jitter() -> None:
    away = failure(StatusCode.UNAVAILABLE)
    whole = [pause_s(away, tries=tries, luck=1.0) for tries in range(1, 9)]
    assert whole == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert pause_s(away, tries=8, luck=0.0) == 0
    assert pause_s(away, tries=10_000, luck=1.0) == 2.0


def test_a_pause_is_never_shorter_than_the_router_asked_for() -> None:
    assert pause_s(failure(StatusCode.UNAVAILABLE, 3.0), tries=1, luck=0.0) == 3.0
    # The client adds jitter, so that callers that were told the same delay do not all call again at the same time.
    assert pause_s(failure(StatusCode.RESOURCE_EXHAUSTED, 3.0), tries=1, luck=1.0) == 4.5
    assert pause_s(failure(StatusCode.UNAVAILABLE, 0.1), tries=9, luck=1.0) == 2.1


def test_who_tries_for_ever_waits_as_asked_with_jitter_and_up_to_a_bound() -> None:
    for asked_s, least_s, most_s in ((None, 0.5, 0.5), (0.1, 0.5, 0.5), (2.0, 2.0, 3.0), (3600.0, 30.0, 45.0)):
        error = Unavailable("no")
        error.retry_after = asked_s
        pauses = {patient_pause_s(error, own_s=0.5) for _ in range(50)}
        assert least_s <= min(pauses) <= max(pauses) <= most_s
        assert len(pauses) > 1 or least_s == most_s


@pytest.mark.parametrize("code", [*sorted(FINAL, key=str), StatusCode.RESOURCE_EXHAUSTED])
def test_what_time_does_not_heal_is_not_tried_again(code: StatusCode) -> None:
    assert pause_s(failure(code), tries=1, luck=0.5) is None


@pytest.mark.parametrize(
    "code", [code for code in StatusCode if code not in {*FINAL, StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED}]
)
def test_everything_else_is_tried_again(code: StatusCode) -> None:
    assert pause_s(failure(code), tries=1, luck=1.0) == pytest.approx(0.05)


@pytest.mark.parametrize("code", [StatusCode.NOT_FOUND, StatusCode.ALREADY_EXISTS, StatusCode.FAILED_PRECONDITION])
def test_what_answers_a_call_of_admin_is_not_tried_again(code: StatusCode) -> None:
    assert pause_s(failure(code), tries=1, luck=0.5, final=ADMIN_FINAL) is None


async def test_a_measure_that_is_none_is_refused_with_all_that_there_are(client: Client) -> None:
    measures = [measure for measure in LimitMeasure if measure is not LimitMeasure.UNKNOWN]
    for none in (cast("LimitMeasure", "jobs"), LimitMeasure.UNKNOWN):
        with pytest.raises(InvalidRequest, match="measure: must be one of") as refused:
            await client.set_limit(none, 5)
        assert all(f"LimitMeasure.{measure.name}" in str(refused.value) for measure in measures)


@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.FAILED_PRECONDITION])
async def test_every_try_of_an_enqueue_names_the_same_job(router: FakeRouter, client: Client, code: StatusCode) -> None:
    router.scripts["Enqueue"] = failing(3, code, router, "Enqueue")
    stored = await client.enqueue("emails", "send", {"to": "ada"})
    tries = router.of("Enqueue")
    assert len(tries) == 4
    assert {request.jobs[0].id for request in tries} == {stored.id}


async def test_a_full_router_is_tried_again_when_it_said_so(router: FakeRouter, client: Client) -> None:
    router.scripts["Enqueue"] = failing(1, StatusCode.RESOURCE_EXHAUSTED, router, "Enqueue", retry_after_s=0.2)
    began = time.monotonic()
    await client.enqueue("emails", "send")
    assert time.monotonic() - began >= 0.2
    assert len(router.of("Enqueue")) == 2


async def test_every_call_names_its_org_in_the_metadata(router: FakeRouter, client: Client) -> None:
    other = client.for_org("Über uns")
    await client.enqueue("emails", "send")
    await other.enqueue("emails", "send")
    await other.dequeue(["emails"])
    await client.get_jobs([])
    await client.get_jobs([uuid7()])
    told = [metadata["windrow-org"] for metadata in router.metadata]
    assert told == ["acme", "%C3%9Cber%20uns", "%C3%9Cber%20uns", "acme"]


async def test_no_time_is_spent_on_a_pause_that_ends_too_late(router: FakeRouter) -> None:
    how = {"retry_after_s": 3000, "reason": "DISK_FULL"}
    router.scripts["Enqueue"] = failing(1, StatusCode.UNAVAILABLE, router, "Enqueue", **how)
    async with Client(router.address, org="acme", timeout=2000) as client:
        with pytest.raises(Unavailable) as caught:
            # The error comes long before the end of the pause and of the timeout.
            await asyncio.wait_for(client.enqueue("emails", "send"), WAIT_S)
    assert caught.value.retry_after == pytest.approx(3000)
    assert caught.value.reason == "DISK_FULL"
    told = r"\[UNAVAILABLE, after \d+\.\d s; a retry in 3000 s would exceed the timeout of 2000 s\]$"
    assert re.search(told, str(caught.value))


async def test_a_try_that_hangs_is_given_up_and_made_again(router: FakeRouter) -> None:
    async def hang_once(request: Any, context: Any) -> Any:
        if len(router.of("Enqueue")) == 1:
            await asyncio.sleep(60)
        return router.plain("Enqueue", request)

    router.scripts["Enqueue"] = hang_once
    # The timeout of a try is long, so that even a busy machine answers the second try.
    async with Client(router.address, org="acme", try_timeout=2.0) as client:
        await client.enqueue("emails", "send")
    assert len(router.of("Enqueue")) == 2


async def test_when_time_is_up_the_error_says_where_how_often_and_how_long(router: FakeRouter) -> None:
    async def hang(request: Any, context: Any) -> Any:
        await asyncio.sleep(60)

    router.scripts["Enqueue"] = hang
    async with Client(router.address, org="acme", timeout=2.0, try_timeout=0.1) as client:
        with pytest.raises(
            DeadlineExceeded, match=rf"^Enqueue at {router.address}: .*DEADLINE_EXCEEDED, \d+ tries in \d\.\d s"
        ):
            await client.enqueue("emails", "send")


async def test_nobody_listening_is_unavailable_within_the_timeout() -> None:
    async with Client("127.0.0.1:9", org="acme", timeout=2.0) as client:
        # Without the client's timeout, gRPC would wait for the router for ever.
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
            await asyncio.wait_for(client.enqueue("emails", "send"), WAIT_S)


async def test_that_no_router_answers_is_logged_once_and_at_the_first_try(caplog: pytest.LogCaptureFixture) -> None:
    async with Client("127.0.0.1:9", org="acme", timeout=2.0) as client:
        for _ in range(2):
            # On a busy machine the last try may end by its deadline.
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await client.enqueue("q", "k")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "windrow.client"]
    assert line.startswith("no router answers at 127.0.0.1:9; trying again: ")


@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.ABORTED, StatusCode.DEADLINE_EXCEEDED])
async def test_a_dequeue_is_tried_again_as_every_other_call(
    router: FakeRouter, client: Client, code: StatusCode
) -> None:
    router.scripts["Dequeue"] = failing(2, code, router, "Dequeue")
    assert await client.dequeue("emails") == []
    assert len(router.of("Dequeue")) == 3


async def test_a_dequeue_is_tried_again_when_a_full_router_said_so(router: FakeRouter, client: Client) -> None:
    full = StatusCode.RESOURCE_EXHAUSTED
    router.scripts["Dequeue"] = failing(1, full, router, "Dequeue", retry_after_s=0.2)
    began = time.monotonic()
    assert await client.dequeue("emails") == []
    assert time.monotonic() - began >= 0.2
    assert len(router.of("Dequeue")) == 2


async def test_a_dequeue_that_waits_has_that_much_longer(router: FakeRouter) -> None:
    async def wait(request: Any, context: Any) -> Any:
        await asyncio.sleep(request.wait.ToTimedelta().total_seconds())
        return router.plain("Dequeue", request)

    router.scripts["Dequeue"] = wait
    async with Client(router.address, org="acme", timeout=2.0, try_timeout=2.0) as client:
        assert await client.dequeue("emails", wait=2.5) == []
        assert await client.dequeue("emails") == []
        assert not router.of("Dequeue")[1].HasField("wait")
        with pytest.raises(InvalidRequest, match="wait: '1m' is neither a number of seconds nor a timedelta"):
            await client.dequeue("emails", wait=cast("Any", "1m"))
        with pytest.raises(InvalidRequest, match="max_jobs: must be 1 to 1,000, not 0"):
            await client.dequeue("q", max_jobs=0)
        with pytest.raises(InvalidRequest, match="wait: must be 0 s to 60 s"):
            await client.dequeue("emails", wait=61)
        with pytest.raises(InvalidRequest, match="wait"):
            await client.dequeue("emails", wait=float("nan"))


async def test_a_dequeue_tried_again_waits_for_what_is_left(router: FakeRouter) -> None:
    async def leave(request: Any, context: Any) -> Any:
        if len(router.of("Dequeue")) == 1:
            await asyncio.sleep(0.3)
            await refuse(context, StatusCode.UNAVAILABLE)
        router.give()
        return router.plain("Dequeue", request)

    router.scripts["Dequeue"] = leave
    async with Client(router.address, org="acme") as client:
        assert len(await client.dequeue("emails", wait=60)) == 1
    first, second = (request.wait.ToTimedelta().total_seconds() for request in router.of("Dequeue"))
    assert first == pytest.approx(60)
    assert 30 < second <= 59.7


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (StatusCode.NOT_FOUND, NotFound),
        (StatusCode.ALREADY_EXISTS, AlreadyExists),
        (StatusCode.FAILED_PRECONDITION, FailedPrecondition),
        (StatusCode.PERMISSION_DENIED, PermissionDenied),
        (StatusCode.UNAUTHENTICATED, Unauthenticated),
        (StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted),
        (StatusCode.INTERNAL, RouterError),
        (StatusCode.UNIMPLEMENTED, RouterTooOld),
    ],
)
async def test_each_status_has_its_error(router: FakeRouter, code: grpc.StatusCode, kind: type[WindrowError]) -> None:
    async def fail(request: Any, context: Any) -> None:
        await refuse(context, code, "because", retry_after_s=3600)

    router.scripts["Enqueue"] = fail
    async with Client(router.address, org="acme") as client:
        # If the client tried this call again, it would wait for an hour.
        with pytest.raises(kind, match="because") as caught:
            await client.enqueue("emails", "send")
    assert type(caught.value) is kind
    assert caught.value.details.startswith("because")


async def test_violations_are_told_by_path(router: FakeRouter, client: Client) -> None:
    async def bad(request: Any, context: Any) -> None:
        await refuse(context, StatusCode.INVALID_ARGUMENT, "1 violation", violations={"jobs[0].queue": "is empty"})

    router.scripts["Enqueue"] = bad
    with pytest.raises(InvalidJob) as caught:
        await client.enqueue("", "send")
    assert caught.value.violations == (Violation("jobs[0].queue", "is empty"),)


async def test_more_jobs_than_one_call_takes_are_refused_unless_each_stands_alone(
    router: FakeRouter, client: Client
) -> None:
    jobs = [NewJob("q", "k") for _ in range(2500)]
    with pytest.raises(InvalidRequest, match="independent=True"):
        await client.enqueue_many(jobs)
    assert not router.requests
    stored = await client.enqueue_many(jobs, independent=True)
    assert [one.id for one in stored] == [job.id for job in jobs]
    assert sorted(len(request.jobs) for request in router.of("Enqueue")) == [500, 1000, 1000]
    assert all(request.independent for request in router.of("Enqueue"))


async def test_large_jobs_that_stand_alone_go_in_calls_of_8_mib(router: FakeRouter, client: Client) -> None:
    jobs = [NewJob("q", "k", bytes(1 << 20)) for _ in range(20)]
    with pytest.raises(InvalidRequest, match="16,777,216"):
        await client.enqueue_many(jobs)
    stored = await client.enqueue_many(jobs, independent=True)
    assert [one.id for one in stored] == [job.id for job in jobs]
    assert sorted(len(request.jobs) for request in router.of("Enqueue")) == [6, 7, 7]


async def test_a_job_too_large_for_any_call_is_told_its_size_and_the_bound(router: FakeRouter, client: Client) -> None:
    payload = bytes((16 << 20) + 1)
    with pytest.raises(InvalidJob, match=r"^jobs\[0\].template.payload: must be at most 1048576 bytes, not 16777217$"):
        await client.enqueue("q", "k", payload)
    with pytest.raises(InvalidJob, match=r"^jobs\[1\].template.payload: "):
        await client.enqueue_many([NewJob("q", "k"), NewJob("q", "k", payload)])
    assert not router.requests


async def test_jobs_that_stand_alone_have_errors_of_their_own(router: FakeRouter, client: Client) -> None:
    async def pick(request: Any, context: Any) -> Any:
        if len(request.jobs) < 1000:
            await refuse(context, StatusCode.PERMISSION_DENIED, "no")
        response = router.plain("Enqueue", request)
        response.results[7].Clear()
        response.results[7].error.CopyFrom(invalid("", {"jobs[7].kind": "is empty"}))
        return response

    router.scripts["Enqueue"] = pick
    jobs = [NewJob("q", "k") for _ in range(2001)]
    stored = await client.enqueue_many(jobs, independent=True)
    assert [at for at, one in enumerate(stored) if one.error] == [7, 1007, 2000]
    refused = stored[1007].error
    assert isinstance(refused, InvalidJob)
    assert refused.violations[0].field == "jobs[1007].kind"
    assert isinstance(stored[2000].error, PermissionDenied)
    assert stored[2000].id == jobs[2000].id


async def test_when_no_part_is_stored_the_error_is_raised(router: FakeRouter, client: Client) -> None:
    router.scripts["Enqueue"] = failing(9, StatusCode.PERMISSION_DENIED, router, "Enqueue")
    with pytest.raises(PermissionDenied):
        await client.enqueue_many([NewJob("q", "k") for _ in range(1500)], independent=True)


async def test_nothing_to_do_asks_nobody(router: FakeRouter, client: Client) -> None:
    assert await client.enqueue_many([]) == []
    assert await client.ack([]) == []
    assert await client.get_jobs([]) == {}
    assert not router.requests


async def test_jobs_that_an_answer_has_no_room_for_are_asked_for_again(router: FakeRouter, client: Client) -> None:
    async def two_at_a_time(request: Any, context: Any) -> Any:
        known, *ids = request.ids
        return queue_pb2.GetJobsResponse(jobs=[job_pb2.Job(id=known)], not_found_ids=ids[:1], omitted_ids=ids[1:])

    router.scripts["GetJobs"] = two_at_a_time
    ids = [uuid7() for _ in range(5)]
    assert list(await client.get_jobs(ids)) == [ids[0], ids[2], ids[4]]
    assert [list(request.ids) for request in router.of("GetJobs")] == [ids, ids[2:], ids[4:]]


async def test_a_router_that_answers_no_job_of_all_that_are_there_is_not_asked_for_ever(
    router: FakeRouter, client: Client
) -> None:
    async def none(request: Any, context: Any) -> Any:
        return queue_pb2.GetJobsResponse(omitted_ids=request.ids)

    router.scripts["GetJobs"] = none
    with pytest.raises(RouterError, match="had no room for even one of 2 jobs"):
        await client.get_jobs([uuid7(), uuid7()])


async def test_jobs_that_may_be_on_a_shard_that_is_away_are_not_taken_for_unknown(
    router: FakeRouter, client: Client
) -> None:
    async def half(request: Any, context: Any) -> Any:
        there = [job_pb2.Job(id=job_id) for job_id in request.ids if job_id.endswith("1")]
        return queue_pb2.GetJobsResponse(jobs=there, unavailable_shards=["s2"])

    router.scripts["GetJobs"] = half
    assert list(await client.get_jobs(["id-1"])) == ["id-1"]
    with pytest.raises(Unavailable, match="did not answer: s2"):
        await client.get_jobs(["id-1", "id-2"])


async def test_one_job_has_one_answer_and_many_jobs_have_many(router: FakeRouter, client: Client) -> None:
    async def stale(request: Any, context: Any) -> Any:
        return queue_pb2.AckResponse(answers=[job_pb2.JOB_ANSWER_STALE for _ in request.acks])

    jobs = [Job(lease=b"%d" % at) for at in range(1500)]
    assert await client.ack(jobs[0], result={"ok": True}) is Answer.OK
    assert router.of("Ack")[0].acks[0].result == b'{"ok":true}'
    assert await client.release(jobs) == [Answer.OK] * 1500
    assert [len(request.leases) for request in router.of("Release")] == [1000, 500]
    router.scripts["Ack"] = stale
    assert await client.ack(jobs[:2]) == [Answer.STALE] * 2
    assert await client.extend(jobs[0], visibility_window=5) is Answer.OK
    assert router.of("Extend")[0].visibility_window.seconds == 5
    assert await client.nack(jobs[:2], error="e" * 9000, retry_after=2) == [Answer.OK] * 2
    nack = router.of("Nack")[0].nacks[1]
    assert (len(nack.failure.message), nack.retry_after.seconds, nack.failure.permanent) == (8192, 2, False)
    await client.nack(jobs[0], permanent=True)
    assert router.of("Nack")[1].nacks[0].failure == job_pb2.Failure(permanent=True)
    await client.nack(jobs[0])
    assert not router.of("Nack")[2].nacks[0].HasField("failure")
    try:
        json.loads("{")
    except ValueError as error:
        await client.nack(jobs[0], error=error)
    failure = router.of("Nack")[3].nacks[0].failure
    assert failure.type == "json.decoder.JSONDecodeError"
    assert failure.message.startswith("Expecting property name")
    assert failure.stack.endswith(f"json.decoder.JSONDecodeError: {failure.message}")


async def test_many_jobs_with_a_long_failure_or_result_are_sent_in_several_calls(
    router: FakeRouter, client: Client
) -> None:
    jobs = [Job(lease=b"%d" % at) for at in range(1000)]
    assert await client.nack(jobs, error=windrow.Failure(message="m", stack="s" * 32_768)) == [Answer.OK] * 1000
    assert await client.ack(jobs, result=b"r" * 65_536) == [Answer.OK] * 1000
    for verb, entries in (("Nack", "nacks"), ("Ack", "acks")):
        sent = router.of(verb)
        assert sum(len(getattr(request, entries)) for request in sent) == 1000
        assert max(request.ByteSize() for request in sent) < 9 * 1024 * 1024


async def test_a_job_that_failed_permanently_is_not_retried(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="retry_after is given for a permanent failure"):
        await client.nack(Job(lease=b"l"), retry_after=1, permanent=True)


async def test_an_answer_may_be_larger_than_a_request(router: FakeRouter, client: Client) -> None:
    for _ in range(20):
        router.give(payload=bytes(1 << 20))
    assert len(await client.dequeue("q", max_jobs=20)) == 20


async def test_channels_are_connections_of_their_own_and_take_turns(router: FakeRouter) -> None:
    async with Client(router.address, org="acme", channels=3) as client:
        for _ in range(9):
            await client.dequeue("q")
    assert sorted(router.peers.count(peer) for peer in set(router.peers)) == [3, 3, 3]


async def test_a_connection_that_falls_silent_while_no_call_is_open_is_closed(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a NAT forgets the connection, nothing arrives any more, and neither side gets an error."""
    quick = {"grpc.keepalive_time_ms": 200, "grpc.keepalive_timeout_ms": 200, "grpc.http2.ping_timeout_ms": 200}
    options = tuple((name, quick.get(name, value)) for name, value in channels._OPTIONS)
    monkeypatch.setattr(channels, "_OPTIONS", options)
    host, _, port = router.address.rpartition(":")
    pings, silent, closed = asyncio.Semaphore(0), asyncio.Event(), asyncio.Event()

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if PING in data:
                    pings.release()
                if not silent.is_set():
                    target.write(data)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        answers = asyncio.create_task(pump(there, writer))
        # This ends when the client closes the connection.
        await pump(reader, back)
        closed.set()
        answers.cancel()
        back.close()
        writer.close()

    async with (
        await asyncio.start_server(carry, "127.0.0.1", 0) as relay,
        Client(f"127.0.0.1:{relay.sockets[0].getsockname()[1]}", org="acme") as client,
    ):
        await client.enqueue("q", "k")
        async with asyncio.timeout(WAIT_S):
            # One or two of these pings are caused by the call.
            for _ in range(5):
                await pings.acquire()
            silent.set()
            await closed.wait()


async def test_the_error_of_an_enqueue_has_the_id_with_which_it_can_be_repeated(router: FakeRouter) -> None:
    router.scripts["Enqueue"] = failing(1, StatusCode.PERMISSION_DENIED, router, "Enqueue")
    async with Client(router.address, org="acme") as client:
        # These two enqueues share a call.
        found = await asyncio.gather(*(client.enqueue("q", "k") for _ in range(2)), return_exceptions=True)
        (sent,) = router.of("Enqueue")
        ids = [error.made_ids for error in found if isinstance(error, WindrowError)]
        assert ids == [(job.id,) for job in sent.jobs]
        assert (await client.enqueue("q", "k", id=ids[0][0])).id == sent.jobs[0].id


async def test_a_walk_over_jobs_goes_on_behind_a_page_without_jobs_and_names_a_shard_that_is_away(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {
        "": admin_pb2.ListJobsResponse(jobs=[job_pb2.Job(id="1", state=job_pb2.JOB_STATE_READY)], next_page_token="a"),
        "a": admin_pb2.ListJobsResponse(next_page_token="b"),
        "b": admin_pb2.ListJobsResponse(jobs=[job_pb2.Job(id="2", state=job_pb2.JOB_STATE_READY)]),
    }

    async def ask(_: object, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        assert (request.queue, request.kind, request.page_size) == ("q", "k", 7)
        return pages[request.page_token]

    monkeypatch.setattr(client, "_ask", ask)
    assert [job.id async for job in client.iter_jobs("q", kind="k", page_size=7)] == ["1", "2"]

    pages["b"].unavailable_shards.append("s2")
    with pytest.raises(Unavailable, match="org 'acme': these shards did not list its jobs: s2"):
        _ = [job async for job in client.iter_jobs("q", kind="k", page_size=7)]


async def test_orgs_share_connections(router: FakeRouter, client: Client) -> None:
    other = client.for_org("globex")
    await client.enqueue("q", "k")
    await other.enqueue("q", "k")
    await other.close()
    await client.enqueue("q", "k")
    assert [request.org for request in router.of("Enqueue")] == ["acme", "globex", "acme"]
    assert len(set(router.peers)) == 1


@pytest.mark.parametrize("shared", [False, True])
async def test_closing_a_client_does_not_wait_for_the_pauses_of_its_calls(router: FakeRouter, shared: bool) -> None:
    async def full(_: Any, context: Any) -> None:
        await refuse(context, StatusCode.RESOURCE_EXHAUSTED, retry_after_s=2 * WAIT_S)

    router.scripts["Enqueue"] = full
    client = Client(router.address, org="acme", timeout=10 * WAIT_S)
    call = client.enqueue("q", "k") if shared else client.enqueue_many([NewJob("q", "k")])
    calling = asyncio.create_task(call)
    await router.until(lambda: router.of("Enqueue"))
    # When the client has read the answer to this later call, it has read the refusal, too.
    await client.server_info()
    async with asyncio.timeout(WAIT_S):
        await client.close()
        with pytest.raises(ClientClosed, match="meanwhile"):
            await calling


async def test_a_closed_client_says_so(router: FakeRouter) -> None:
    client = Client(router.address, org="acme")

    async def hang(request: Any, context: Any) -> Any:
        await asyncio.sleep(60)

    router.scripts["Dequeue"] = hang
    call = asyncio.create_task(client.dequeue("q"))
    await router.until(lambda: router.of("Dequeue"))
    await client.close()
    with pytest.raises(ClientClosed, match="meanwhile"):
        await call
    with pytest.raises(ClientClosed, match="is closed"):
        await client.dequeue("q")
    await client.close()


async def test_the_callers_cancellation_passes_through(router: FakeRouter, client: Client) -> None:
    async def hang(request: Any, context: Any) -> Any:
        await asyncio.sleep(60)

    router.scripts["Dequeue"] = hang
    call = asyncio.create_task(client.dequeue("q"))
    await router.until(lambda: router.of("Dequeue"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_client_belongs_to_one_event_loop(client: Client) -> None:
    await client.dequeue("q")
    with pytest.raises(ClientClosed, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(client.dequeue("q")))


async def test_the_router_may_come_later_and_go_in_between() -> None:
    with reserved_address() as address:
        async with Client(address, org="acme") as client:
            waiting = asyncio.create_task(client.enqueue("q", "k"))
            # The client is refused at least once before the server listens.
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
            async with fake_router(address):
                await waiting
            waiting = asyncio.create_task(client.enqueue("q", "k"))
            async with fake_router(address) as third:
                await asyncio.wait_for(waiting, WAIT_S)
                assert len(third.of("Enqueue")) == 1


def test_arguments_that_make_no_sense_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="org is empty"):
        Client(org="")
    with pytest.raises(InvalidRequest, match="org must be a str, not 5"):
        Client(org=cast("Any", 5))
    with pytest.raises(InvalidRequest, match="channels must be 1 to 64, not 0"):
        Client(org="acme", channels=0)
    with pytest.raises(InvalidRequest, match="channels must be an int, not '2'"):
        Client(org="acme", channels=cast("Any", "2"))
    with pytest.raises(InvalidRequest, match=r"middleware must be a sequence of functions, not \[7\]"):
        Client(org="acme", middleware=cast("Any", [7]))
    with pytest.raises(InvalidRequest, match="timeouts"):
        Client(org="acme", timeout=0)
    with pytest.raises(InvalidRequest, match="timeout: '5s' is neither a number of seconds nor a timedelta"):
        Client(org="acme", timeout=cast("Any", "5s"))
    assert Client(org="acme").calls.address == "127.0.0.1:7419"
    monkeypatch.setenv("WINDROW_ADDRESS", "router:1")
    assert Client(org="acme").calls.address == "router:1"


@pytest.mark.parametrize(
    "address",
    [
        *("router", "router:", ":7419", "router:http", "router:0", "router:65536", "7419", "two words:7419"),
        *("http://127.0.0.1:7419", "https://router:7419", "grpc://router:7419", "::1:7419", "router:7419/"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused_at_once(address: str) -> None:
    with pytest.raises(
        InvalidRequest,
        match=f"^{re.escape(repr(address))} .*: write HOST:PORT, such as 127.0.0.1:7419, or grpcs://HOST:PORT for TLS$",
    ):
        Client(address, org="acme")


@pytest.mark.parametrize(
    "address",
    ["router:7419", "127.0.0.1:7419", "[::1]:7419", "[fe80::1%eth0]:1", "dns:///router:7419", "unix:/run/windrow.sock"],
)
def test_an_address_that_grpc_takes_is_taken(address: str) -> None:
    assert Client(address, org="acme").calls.address == address


async def test_nothing_is_redriven_while_a_shard_has_not_counted_its_dead_jobs(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stats(_: str, **__: object) -> Stats:
        return Stats(queues={}, unavailable_shards=["s2"])

    monkeypatch.setattr(client, "_stats", stats)
    with pytest.raises(Unavailable, match="did not count its dead jobs: s2"):
        await client.redrive_queue("emails")


async def test_a_router_that_ignores_conditions_lists_no_other_jobs(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router without the feature JOB_SEARCH ignores conditions."""
    states = [job_pb2.JOB_STATE_READY, job_pb2.JOB_STATE_SUCCEEDED]
    jobs = [job_pb2.Job(id=f"{n}-{state}", state=state, attributes={"n": n}) for n in "12" for state in states]

    async def ask(_: object, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        return admin_pb2.ListJobsResponse(jobs=jobs)

    monkeypatch.setattr(client, "_ask", ask)
    page = await client.list_jobs(states=[JobState.READY, JobState.DEAD], attributes={"n": "2"})
    assert [job.id for job in page.jobs] == [f"2-{job_pb2.JOB_STATE_READY}"]
    assert len((await client.list_jobs()).jobs) == 4


@pytest.mark.parametrize("name", ["get_jobs", "cancel_jobs", "alter_jobs", "redrive_jobs", "restore_jobs"])
async def test_one_id_in_place_of_a_list_of_ids_is_refused_with_what_to_write(name: str) -> None:
    options: dict[str, Any] = {"priority": 1} if name == "alter_jobs" else {}
    async with fake_router() as router, Client(router.address, org="acme") as client:
        call = getattr(client, name)
        one = uuid7()
        with pytest.raises(InvalidRequest, match=rf"^ids: must be a list of ids, not one id: write \['{one}'\]$"):
            await call(one, **options)
        with pytest.raises(InvalidRequest, match=r"^ids\[1\]: must be a str, not 7$"):
            await call([one, 7], **options)
        assert not router.requests


@pytest.mark.parametrize("name", ["ack", "nack", "extend", "release", "snooze"])
async def test_what_is_no_leased_job_is_refused_with_what_was_given(name: str) -> None:
    options: dict[str, Any] = {"after": 1.0} if name == "snooze" else {}
    async with fake_router() as router, Client(router.address, org="acme") as client:
        call = getattr(client, name)
        for wrong in (uuid7(), None, [Job(), 7]):
            with pytest.raises(InvalidRequest, match=r"^jobs: must be a job that was leased .*, not ('0|None|7)"):
                await call(wrong, **options)
        assert not router.requests


async def test_one_job_in_place_of_a_list_of_jobs_is_refused() -> None:
    async with fake_router() as router, Client(router.address, org="acme") as client:
        with pytest.raises(InvalidRequest, match=r"^jobs: must be a list of jobs, not one job"):
            await client.enqueue_many(cast("Any", NewJob("emails", "greet")))
        assert not router.requests


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda client: client.for_org("a\ud800"), "org"),
        (lambda client: client.dequeue(["emails", "a\ud800"]), r"queues\[1\]"),
        (lambda client: client.dequeue("emails", worker="a\ud800"), "worker"),
        (lambda client: client.get_jobs(["a\ud800"]), r"ids\[0\]"),
        (lambda client: client.find_job("a\ud800", "key"), "queue"),
        (lambda client: client.find_job("emails", "a\ud800"), "dedup_key"),
        (lambda client: client.wait("a\ud800", timeout=1), "id"),
        (lambda client: client.cancel_jobs(["a"], reason="a\ud800"), "reason"),
        (lambda client: client.quarantine_kind("emails", "send", reason="a\ud800"), "reason"),
        (lambda client: client.get_workflow("a\ud800"), "workflow_id"),
        (lambda client: client.list_nodes("a\ud800"), "workflow_id"),
        (lambda client: client.cancel_workflow("a", reason="a\ud800"), "reason"),
        (lambda client: client.skip_node("a", "a\ud800"), "node"),
        (lambda client: client.signal("a", "a\ud800"), "node"),
        (lambda client: client.retry_workflow("a", new_id="a\ud800"), "new_id"),
        (lambda client: client.ack(Job(), result="a\ud800"), "result: a result"),
        (lambda client: client.extend(Job(), checkpoint="a\ud800"), "a checkpoint"),
        (lambda client: client.count_jobs(JobFilter(kind="a\ud800")), "kind"),
        (lambda client: client.count_jobs(JobFilter(attributes={"a": "a\ud800"})), r"attributes\['a'\]"),
        (lambda client: Worker(client, ["a\ud800"]), "queues"),
        (lambda client: Worker(client, "emails", name="a\ud800"), "name"),
    ],
)
async def test_a_text_with_a_lone_surrogate_is_refused_with_its_argument_and_its_text(
    client: Client, call: Callable[[Client], Any], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}:? must not have lone surrogates.*, not 'a\\ud800'$"):
        await call(client)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda client: client.wait(7, timeout=1), "id"),
        (lambda client: client.cancel_jobs(["a"], reason=7), "reason"),
        (lambda client: client.get_workflow(7), "workflow_id"),
        (lambda client: client.signal("a", 7), "node"),
        (lambda client: Worker(client, "emails", name=cast("Any", 7)), "name"),
    ],
)
async def test_what_is_no_text_is_refused_with_its_argument(
    client: Client, call: Callable[[Client], Any], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}:? must be a str, not 7$"):
        await call(client)


async def test_calls_about_leased_jobs_go_to_the_orgs_of_the_jobs(router: FakeRouter, client: Client) -> None:
    """The handlers of a worker of all orgs get jobs of orgs that are not the org of the worker's client."""
    jobs = [Job(lease=name.encode(), org=org) for name, org in (("1", "acme"), ("2", "globex"), ("3", ""), ("4", "o4"))]

    async def odd_is_stale(request: queue_pb2.NackRequest, _: Any) -> queue_pb2.NackResponse:
        odd = [int(nack.lease) % 2 for nack in request.nacks]
        return queue_pb2.NackResponse(
            answers=[job_pb2.JOB_ANSWER_STALE if one else job_pb2.JOB_ANSWER_OK for one in odd]
        )

    router.scripts["Nack"] = odd_is_stale
    stale, ok = Answer.STALE, Answer.OK
    assert await client.nack(jobs) == [stale, ok, stale, ok]
    assert [(request.org, [one.lease for one in request.nacks]) for request in router.of("Nack")] == [
        ("acme", [b"1", b"3"]),
        ("globex", [b"2"]),
        ("o4", [b"4"]),
    ]
    await client.ack(jobs[1])
    await client.ack(jobs[1:2])
    await client.extend(jobs[1])
    await client.release(jobs[1])
    await client.snooze(jobs[1], after=1)
    verbs = ("Ack", "Ack", "Extend", "Release", "Snooze")
    assert [(verb, request.org) for verb, request in router.requests[3:]] == [(verb, "globex") for verb in verbs]


async def test_a_job_of_another_org_adds_nodes_in_its_own_org(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    orgs: list[tuple[str, str]] = []

    async def ask(_: object, request: Any) -> Any:
        orgs.append((type(request).__name__, request.org))
        if isinstance(request, workflows_pb2.AddNodesRequest):
            return workflows_pb2.AddNodesResponse(job_ids=[uuid7()])
        parents = [workflows_pb2.ParentInfo(name="a"), workflows_pb2.ParentInfo(name="b")]
        return workflows_pb2.ListParentsResponse(parents=parents)

    monkeypatch.setattr(client, "_ask_workflows", ask)
    job = Job(org="globex", workflow=WorkflowNode(workflow_id=uuid7(), node=0))
    for name, call in (("a", client.add_nodes), ("b", client.wait_for)):
        nodes = Nodes()
        nodes.job("q", "k", name=name)
        await call(job, nodes)
    await client.parents(job)
    assert orgs == [
        ("AddNodesRequest", "globex"),
        ("AddNodesRequest", "globex"),
        ("ListParentsRequest", "globex"),
        ("ListParentsRequest", "globex"),
    ]
