"""Callers that share calls: no caller is delayed, and each caller has its own outcome, deadline and cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from grpc import StatusCode
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.unit.client_fake import WAIT_S, FakeRouter, invalid, refuse
from windrow import (
    Answer,
    Client,
    ClientClosed,
    DeadlineExceeded,
    InvalidJob,
    InvalidRequest,
    Job,
    NewJob,
    PermissionDenied,
    ResourceExhausted,
    Violation,
    WindrowError,
)
from windrow.coalescer import Coalescer
from windrow.limits import LIMIT_REACHED
from windrow.v1 import job_pb2, queue_pb2


class Gate:
    """Holds the calls of one verb until the test opens the gate."""

    def __init__(self, router: FakeRouter, verb: str) -> None:
        self._router = router
        self._verb = verb
        self.open = asyncio.Event()
        router.scripts[verb] = self

    async def __call__(self, request: Any, context: Any) -> Any:
        await self.open.wait()
        return self._router.plain(self._verb, request)


CALLS_MAX = 2


async def arrived(router: FakeRouter, calls: int) -> None:
    await router.until(lambda: len(router.of("Enqueue")) == calls)


async def filled(router: FakeRouter, client: Client, gate: Gate) -> list[asyncio.Task[Any]]:
    """Starts as many calls as may run at the same time."""
    tasks: list[asyncio.Task[Any]] = []
    for count in range(1, CALLS_MAX + 1):
        tasks.append(asyncio.create_task(client.enqueue("q", "first")))
        await arrived(router, count)
    return tasks


async def test_what_is_enqueued_in_one_turn_leaves_in_one_call_at_once(router: FakeRouter, client: Client) -> None:
    stored = await asyncio.gather(*(client.enqueue("q", "k", f"{at}") for at in range(100)))
    (request,) = router.of("Enqueue")
    assert request.independent
    assert [job.id for job in request.jobs] == [one.id for one in stored]
    assert [job.template.payload for job in request.jobs] == [b"%d" % at for at in range(100)]


async def test_one_job_alone_goes_as_it_ever_did(router: FakeRouter, client: Client) -> None:
    await client.enqueue("q", "k")
    (request,) = router.of("Enqueue")
    assert not request.independent


async def test_what_is_enqueued_while_calls_are_under_way_goes_together_when_one_returns(
    router: FakeRouter, client: Client
) -> None:
    gate = Gate(router, "Enqueue")
    tasks = await filled(router, client, gate)
    for _ in range(50):
        tasks.append(asyncio.create_task(client.enqueue("q", "k")))
        await asyncio.sleep(0)
    gate.open.set()
    stored = await asyncio.gather(*tasks)
    assert [len(request.jobs) for request in router.of("Enqueue")] == [1, 1, 50]
    assert [job.id for job in router.of("Enqueue")[2].jobs] == [one.id for one in stored[CALLS_MAX:]]


async def test_a_shared_call_has_at_most_1000_jobs_and_4_mib(router: FakeRouter, client: Client) -> None:
    await asyncio.gather(*(client.enqueue("q", "k") for _ in range(1500)))
    assert sorted(len(request.jobs) for request in router.of("Enqueue")) == [500, 1000]
    await asyncio.gather(*(client.enqueue("q", "k", bytes(1 << 20)) for _ in range(5)))
    assert sorted(len(request.jobs) for request in router.of("Enqueue")[2:]) == [2, 3]


async def test_explicit_batches_stay_whole_and_alone(router: FakeRouter, client: Client) -> None:
    await asyncio.gather(
        client.enqueue("q", "k"), client.enqueue_many([NewJob("q", "k"), NewJob("q", "k")]), client.enqueue("q", "k")
    )
    assert sorted((len(request.jobs), request.independent) for request in router.of("Enqueue")) == [
        (2, False),
        (2, True),
    ]


async def test_a_bad_job_fails_its_caller_only_and_as_if_it_had_been_alone(router: FakeRouter, client: Client) -> None:
    async def pick(request: Any, context: Any) -> Any:
        response = router.plain("Enqueue", request)
        for at, job in enumerate(request.jobs):
            if job.template.kind == "bad":
                error = invalid(f"jobs[{at}].kind: is bad", {f"jobs[{at}].kind": "is bad"})
                response.results[at].error.CopyFrom(error)
                response.results[at].id = ""
        return response

    router.scripts["Enqueue"] = pick
    kinds = ["good", "good", "bad", "good"]
    told = await asyncio.gather(*(client.enqueue("q", kind) for kind in kinds), return_exceptions=True)
    assert len(router.of("Enqueue")) == 1
    assert [isinstance(one, Exception) for one in told] == [False, False, True, False]
    error = told[2]
    assert isinstance(error, InvalidJob)
    assert error.violations == (Violation("jobs[0].kind", "is bad"),)
    assert "jobs[0].kind: is bad" in str(error)
    assert "jobs[2]" not in str(error)


async def test_a_job_with_no_form_on_the_wire_never_gets_into_a_shared_call(router: FakeRouter, client: Client) -> None:
    told = await asyncio.gather(
        client.enqueue("q", "k"), client.enqueue("q", "k", delay=float("nan")), return_exceptions=True
    )
    assert isinstance(told[1], InvalidJob)
    assert told[1].violations[0].field == "jobs[0].delay"
    assert [len(request.jobs) for request in router.of("Enqueue")] == [1]


async def test_an_error_of_the_whole_call_reaches_each_caller_as_its_own_error(
    router: FakeRouter, client: Client
) -> None:
    async def forbidden(request: Any, context: Any) -> None:
        await refuse(context, StatusCode.PERMISSION_DENIED, "no token")

    router.scripts["Enqueue"] = forbidden
    told = await asyncio.gather(*(client.enqueue("q", "k") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, PermissionDenied) and "no token" in str(one) for one in told)
    assert len({id(one) for one in told}) == 3

    async def no_such_org(request: Any, context: Any) -> None:
        await refuse(context, StatusCode.INVALID_ARGUMENT, "bad org", violations={"org": "too long"})

    router.scripts["Enqueue"] = no_such_org
    calls = len(router.of("Enqueue"))
    told = await asyncio.gather(*(client.enqueue("q", "k") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, InvalidRequest) and one.violations == (("org", "too long"),) for one in told)
    assert len(router.of("Enqueue")) == calls + 1


async def test_a_caller_cancelled_before_its_job_left_takes_it_along(router: FakeRouter, client: Client) -> None:
    gate = Gate(router, "Enqueue")
    tasks = await filled(router, client, gate)
    going, staying = (asyncio.create_task(client.enqueue("q", kind)) for kind in ("going", "staying"))
    await asyncio.sleep(0)
    going.cancel()
    gate.open.set()
    await asyncio.gather(*tasks, staying)
    assert going.cancelled()
    assert [job.template.kind for request in router.of("Enqueue") for job in request.jobs] == [
        "first",
        "first",
        "staying",
    ]


async def test_a_caller_cancelled_when_its_job_had_left_leaves_the_others_theirs(
    router: FakeRouter, client: Client
) -> None:
    gate = Gate(router, "Enqueue")
    going, staying = (asyncio.create_task(client.enqueue("q", kind)) for kind in ("going", "staying"))
    await router.until(lambda: router.of("Enqueue"))
    going.cancel()
    await asyncio.wait([going])
    gate.open.set()
    assert (await staying).id == router.of("Enqueue")[0].jobs[1].id
    assert going.cancelled()
    assert not client._enqueues._by_org


async def test_each_caller_has_its_own_deadline(router: FakeRouter) -> None:
    async with Client(router.address, org="acme", timeout=0.5) as client:
        Gate(router, "Enqueue")
        began = time.monotonic()
        early = [asyncio.create_task(client.enqueue("q", "first")) for _ in range(CALLS_MAX)]
        await router.until(lambda: router.of("Enqueue"))
        early += [asyncio.create_task(client.enqueue("q", "first")) for _ in range(CALLS_MAX)]
        await router.until(lambda: len(router.of("Enqueue")) == CALLS_MAX)
        await asyncio.sleep(0.2)
        late = [asyncio.create_task(client.enqueue("q", "waits"))]
        await asyncio.sleep(0.2)
        last = [asyncio.create_task(client.enqueue("q", "waits"))]
        order: list[float] = []
        for tasks, at_s in ((early, 0.5), (late, 0.7), (last, 0.9)):
            for task in tasks:
                task.add_done_callback(lambda _, at_s=at_s: order.append(at_s))  # type: ignore[misc]
        for tasks, at_s in ((early, 0.5), (late, 0.7), (last, 0.9)):
            told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
            assert all(isinstance(one, DeadlineExceeded) for one in told)
            # No call fails before its own timeout has passed.
            assert at_s - 0.05 <= time.monotonic() - began
        # No call waits for a call that came later.
        assert order == [0.5] * len(early) + [0.7, 0.9]


async def test_a_shared_call_is_tried_again_with_the_same_jobs(router: FakeRouter, client: Client) -> None:
    async def once(request: Any, context: Any) -> Any:
        if len(router.of("Enqueue")) == 1:
            await refuse(context, StatusCode.UNAVAILABLE)
        return router.plain("Enqueue", request)

    router.scripts["Enqueue"] = once
    stored = await asyncio.gather(*(client.enqueue("q", "k") for _ in range(10)))
    first, second = router.of("Enqueue")
    assert first == second
    assert [job.id for job in second.jobs] == [one.id for one in stored]


async def test_each_org_has_calls_of_its_own_which_all_its_clients_share(router: FakeRouter, client: Client) -> None:
    await asyncio.gather(*(client.for_org(org).enqueue("q", "k") for org in ("acme", "globex") * 20))
    assert sorted((request.org, len(request.jobs)) for request in router.of("Enqueue")) == [
        ("acme", 20),
        ("globex", 20),
    ]
    assert not client._enqueues._by_org


async def test_closing_ends_those_that_wait_and_those_under_way(router: FakeRouter) -> None:
    client = Client(router.address, org="acme")
    gate = Gate(router, "Enqueue")
    tasks = await filled(router, client, gate)
    tasks += [asyncio.create_task(client.enqueue("q", "k")) for _ in range(3)]
    await asyncio.sleep(0)
    await client.close()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, ClientClosed) for one in told)
    assert not client.calls._tasks
    with pytest.raises(ClientClosed):
        await client.for_org("another").enqueue("q", "k")
    assert not client._enqueues._by_org


async def test_closing_ends_those_that_wait_until_a_limit_has_room(router: FakeRouter) -> None:
    async def full(_: Any, context: Any) -> None:
        await refuse(context, StatusCode.RESOURCE_EXHAUSTED, retry_after_s=2 * WAIT_S, reason=LIMIT_REACHED)

    router.scripts["Enqueue"] = full
    client = Client(router.address, org="acme", timeout=10 * WAIT_S)
    calling = asyncio.create_task(client.enqueue("q", "k"))
    await router.until(lambda: client._enqueues._by_org and client._enqueues._by_org["acme"]._paused)
    async with asyncio.timeout(WAIT_S):
        await client.close()
        with pytest.raises(ClientClosed, match="meanwhile"):
            await calling
    assert not client.calls._tasks
    assert not client._enqueues._by_org


async def test_an_eager_loop_sends_again_what_waited_until_a_limit_has_room(router: FakeRouter, client: Client) -> None:
    def begin_at_once(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        """Enters the task's context at once, as asyncio.eager_task_factory of Python 3.12 does."""
        if (context := options.get("context")) is not None:
            context.run(lambda: None)
        return asyncio.Task(work, loop=loop, **options)

    async def full_at_first(request: Any, context: Any) -> Any:
        if len(router.of("Enqueue")) == 1:
            await refuse(context, StatusCode.RESOURCE_EXHAUSTED, retry_after_s=0.01, reason=LIMIT_REACHED)
        return router.plain("Enqueue", request)

    router.scripts["Enqueue"] = full_at_first
    loop = asyncio.get_running_loop()
    # The loop also serves the fake router, whose tasks have no context of their own.
    loop.set_task_factory(begin_at_once)
    try:
        await client.enqueue("q", "k")
    finally:
        loop.set_task_factory(None)
    assert len(router.of("Enqueue")) == 2
    assert not client._enqueues._by_org


async def test_another_event_loop_is_told_so_at_once(router: FakeRouter, client: Client) -> None:
    await client.enqueue("q", "k")
    with pytest.raises(ClientClosed, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(client.enqueue("q", "k")))


async def test_acks_of_one_job_each_share_calls_and_have_their_own_answers(router: FakeRouter, client: Client) -> None:
    async def pick(request: Any, context: Any) -> Any:
        answers = {b"old": job_pb2.JOB_ANSWER_STALE}
        return queue_pb2.AckResponse(answers=[answers.get(ack.lease, job_pb2.JOB_ANSWER_OK) for ack in request.acks])

    router.scripts["Ack"] = pick
    leases = [b"a", b"old", b"b"]
    told = await asyncio.gather(*(client.ack(Job(lease=lease), result=lease) for lease in leases))
    assert told == [Answer.OK, Answer.STALE, Answer.OK]
    (request,) = router.of("Ack")
    assert [(ack.lease, ack.result) for ack in request.acks] == [(lease, lease) for lease in leases]


async def test_a_bad_lease_fails_its_caller_only(router: FakeRouter, client: Client) -> None:
    """A router refuses a whole Ack call, so the client sends the other leases again."""

    async def pick(request: Any, context: Any) -> Any:
        bad = {f"acks[{at}].lease": "no lease" for at, ack in enumerate(request.acks) if ack.lease.startswith(b"bad")}
        if bad:
            await refuse(context, StatusCode.INVALID_ARGUMENT, "refused", violations=bad)
        return router.plain("Ack", request)

    router.scripts["Ack"] = pick
    told = await asyncio.gather(
        *(client.ack(Job(lease=lease)) for lease in (b"a", b"bad1", b"b", b"bad2")), return_exceptions=True
    )
    assert [one if isinstance(one, Answer) else type(one) for one in told] == [
        Answer.OK,
        InvalidRequest,
        Answer.OK,
        InvalidRequest,
    ]
    assert isinstance(told[3], InvalidRequest)
    assert told[3].violations == (Violation("acks[0].lease", "no lease"),)
    assert [len(request.acks) for request in router.of("Ack")] == [4, 2]


async def test_each_job_of_a_shared_call_carries_its_callers_trace(router: FakeRouter) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("test")

    async def request(client: Client, number: int) -> None:
        with tracer.start_as_current_span(f"request {number}"):
            await client.enqueue("q", f"{number}")

    async with Client(router.address, org="acme", tracer_provider=provider) as client:
        await asyncio.gather(*(request(client, number) for number in range(3)))
    (shared,) = router.of("Enqueue")
    by_trace = {
        f"{context.trace_id:032x}": span.name
        for span in spans.get_finished_spans()
        if span.parent is None and (context := span.get_span_context())
    }
    assert [by_trace[job.trace.traceparent.split("-")[1]] for job in shared.jobs] == [
        f"request {number}" for number in range(3)
    ]
    # The shared call is not in the trace of any caller.
    assert "traceparent" not in router.metadata[0]
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_a_call_lasts_for_as_long_as_the_request_with_the_most_time_left(
    router: FakeRouter, client: Client
) -> None:
    """A request that waited because of a limit may be older than the requests that are sent before it."""
    loop = asyncio.get_running_loop()
    full = ResourceExhausted("full")
    full.reason, full.retry_after = LIMIT_REACHED, 0.3
    ends: dict[tuple[str, ...], float] = {}
    answering = asyncio.Event()
    new_after = 0.0

    async def send(items: Sequence[str], timeout_s: float) -> list[str | WindrowError]:
        nonlocal new_after
        ends[tuple(items)] = loop.time() + timeout_s
        if items == ["old"]:
            group.create_task(shared.put("between", 1, loop))
            await asyncio.sleep(0)
            return [full]
        if items == ["between"]:
            new_after = loop.time()
            group.create_task(shared.put("new", 1, loop))
            await answering.wait()
        return list(items)

    shared = Coalescer[str, str](client.calls, send, items_max=10, calls_max=1, on_idle=lambda: None)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(shared.put("old", 1, loop))
        await router.until(lambda: new_after and not shared._paused)
        answering.set()
    assert ends["new", "old"] >= new_after + client.calls.timeout_s > ends["old",]
