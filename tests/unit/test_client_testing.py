"""windrow.testing: handlers run and enqueues recorded without a router."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit import isolated_handlers
from windrow import (
    AttemptOutcome,
    Client,
    Enqueued,
    InvalidJob,
    InvalidRequest,
    Job,
    JobState,
    Kill,
    NewJob,
    Nodes,
    Payload,
    Progress,
    Retry,
    Snooze,
    SyncClient,
    Worker,
    testing,
    uuid7,
)
from windrow.handlers import CallNext


@pytest.fixture
def client() -> testing.RecordingClient:
    return testing.RecordingClient(org="acme")


# ── Handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_handler_that_returns_has_its_result_log_and_reports_in_what_it_led_to(client: Client) -> None:
    worker = Worker(client, ["mails"])

    @worker.handler("send")
    async def send(job: Job) -> Payload:
        job.log("to ada")
        job.report(Progress(done=1, total=2), checkpoint="half")
        job.report(Progress(done=2, total=2))
        return {"to": job.json()["to"], "attempt": job.attempt, "before": job.checkpoint.decode()}

    sent = await testing.run_job(worker, NewJob("mails", "send", {"to": "ada"}), attempt=2, checkpoint=b"none")
    assert (sent.outcome, sent.state) == (AttemptOutcome.ACKED, JobState.SUCCEEDED)
    assert sent.result == b'{"to":"ada","attempt":2,"before":"none"}'
    assert (sent.log, sent.progress, sent.checkpoint) == ("to ada", Progress(done=2, total=2), b"half")


async def test_a_handler_sees_what_the_producer_gave(client: Client) -> None:
    both = {field.name for field in fields(NewJob)} & {field.name for field in fields(Job)}
    values: dict[str, Any] = {name: f"of-{name}" for name in both}
    values |= {"payload": b"x", "attributes": {"a": "b"}, "priority": 3, "max_attempts": 7}
    values |= {"id": uuid7(), "run_at": datetime.now(UTC), "max_runtime": timedelta(minutes=1)}
    worker, seen = Worker(client, [values["queue"]]), list[Job]()

    @worker.handler(values["kind"])
    async def look(job: Job) -> None:
        seen.append(job)

    await testing.run_job(worker, NewJob(**values))
    # The job runs now, even if its `run_at` is later.
    for name in both - {"run_at"}:
        assert getattr(seen[0], name) == values[name], name


@pytest.mark.parametrize(
    ("error", "attempt", "outcome", "state", "after"),
    [
        (ValueError("no"), 1, AttemptOutcome.NACKED, JobState.SCHEDULED, None),
        (ValueError("no"), 3, AttemptOutcome.NACKED, JobState.DEAD, None),
        (Retry("no", after=60), 1, AttemptOutcome.NACKED, JobState.SCHEDULED, timedelta(minutes=1)),
        (Retry("no", after=60), 3, AttemptOutcome.NACKED, JobState.DEAD, None),
        (Kill("no"), 1, AttemptOutcome.NACKED, JobState.DEAD, None),
        (Snooze("no", after=60), 3, AttemptOutcome.RELEASED, JobState.SCHEDULED, timedelta(minutes=1)),
    ],
)
async def test_a_handler_that_raises_leads_to_what_a_router_would_make_of_it(
    client: Client,
    error: Exception,
    attempt: int,
    outcome: AttemptOutcome,
    state: JobState,
    after: timedelta | None,
) -> None:
    worker = Worker(client, "q")

    @worker.handler("broken")
    def broken(job: Job) -> None:
        raise error

    result = await testing.run_job(worker, NewJob("q", "broken", max_attempts=3), attempt=attempt)
    assert (result.outcome, result.state, result.after) == (outcome, state, after)
    assert (result.reason if result.failure is None else result.failure.message) == "no"


async def test_a_handler_runs_within_middleware_and_timeout_and_in_its_process(client: Client) -> None:
    seen: list[str] = []

    async def middleware(job: Job, call_next: CallNext) -> Payload:
        seen.append(job.kind)
        return await call_next(job)

    worker = Worker(client, "q", middleware=[middleware])

    @worker.handler("hangs", timeout=0.01)
    async def hangs(job: Job) -> None:
        await asyncio.Event().wait()

    worker.handler("isolated", isolate="process")(isolated_handlers.add)
    late = await testing.run_job(worker, NewJob("q", "hangs"))
    assert late.failure is not None
    assert (late.state, late.failure.type) == (JobState.SCHEDULED, "windrow.TimedOut")
    # A worker can run several jobs, one after another.
    for _ in range(2):
        there = await testing.run_job(worker, NewJob("q", "isolated", [1, 2]))
        assert b'"sum":3' in there.result, there.failure
    assert seen == ["hangs", "isolated", "isolated"]


@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_handler_whose_own_code_cancels_its_task_has_failed_as_in_a_worker(
    client: Client, is_batch: bool
) -> None:
    worker = Worker(client, ["mails"])

    async def cancel(jobs: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    (worker.batch_handler if is_batch else worker.handler)("cancels")(cancel)
    failed = await testing.run_job(worker, NewJob("mails", "cancels"))
    assert (failed.outcome, failed.state) == (AttemptOutcome.NACKED, JobState.SCHEDULED)
    assert failed.failure is not None
    assert failed.failure.type == "asyncio.exceptions.CancelledError"


async def test_a_job_that_waits_for_nodes_goes_on_with_the_results_of_the_test(client: Client) -> None:
    worker = Worker(client, "crawl")

    @worker.handler("crawl_site")
    async def crawl_site(job: Job) -> list[object]:
        assert job.workflow is not None
        pages = Nodes()
        for number in range(2):
            pages.job("crawl", "fetch", {"page": number}, name=f"page {number}")
        found = await job.workflow.wait_for(pages)
        approval = Nodes()
        approval.signal("approved", "crawl", timeout=60)
        (approved,) = await job.workflow.wait_for(approval)
        assert (await job.workflow.add(pages)).stored == 0
        return [*(int(page.result) for page in found), approved.name, approved.state.value, approved.result.decode()]

    async def run(**results: Payload) -> testing.AttemptResult:
        job = NewJob("crawl", "crawl_site")
        return await testing.run_job(
            worker, job, results={name.replace("_", " "): one for name, one in results.items()}
        )

    for waits in (await run(), await run(page_0=3)):
        assert (waits.outcome, waits.state) == (AttemptOutcome.RELEASED, JobState.BLOCKED)
        assert {name: (job.kind, job.payload) for name, job in waits.added.items()} == {
            "page 0": ("fetch", b'{"page":0}'),
            "page 1": ("fetch", b'{"page":1}'),
        }
    assert [*(await run(page_0=3, page_1=4)).added] == ["page 0", "page 1", "approved"]
    done = await run(page_0=3, page_1=4, approved={"by": "ann"})
    assert (done.state, json.loads(done.result)) == (
        JobState.SUCCEEDED,
        [3, 4, "approved", "succeeded", '{"by":"ann"}'],
    )


async def test_a_job_without_results_is_in_no_workflow(client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("looks")
    async def looks(job: Job) -> bool:
        return job.workflow is None

    assert (await testing.run_job(worker, NewJob("q", "looks"))).result == b"true"


async def test_a_node_that_a_router_would_refuse_is_refused(client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("adds")
    async def adds(job: Job) -> None:
        assert job.workflow is not None
        more = Nodes()
        more.job("q", "good")
        more.job("q", "bad", priority=10)
        await job.workflow.add(more)

    failed = await testing.run_job(worker, NewJob("q", "adds"), results={})
    assert failed.failure is not None
    # A router also names the node in this way, and not as a job of an enqueue.
    assert failed.failure.type == "windrow.errors.InvalidRequest"
    assert failed.failure.message.startswith("nodes[1].job.template.priority: must be 1 to 9, not 10")


async def test_a_test_that_is_cancelled_cancels_the_handler(client: Client) -> None:
    worker = Worker(client, ["mails"])
    ended: list[str] = []

    @worker.handler("waits")
    async def waits(job: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(job.id)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await testing.run_job(worker, NewJob("mails", "waits"))
    assert len(ended) == 1


async def test_a_job_that_the_worker_would_never_get_is_refused(client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("known")
    async def known(job: Job) -> None: ...

    with pytest.raises(InvalidJob, match=r"jobs\[0\]\.template\.priority: "):
        await testing.run_job(worker, NewJob("q", "known", priority=10))
    with pytest.raises(InvalidRequest, match="queue: must be one of the worker's, not 'other'"):
        await testing.run_job(worker, NewJob("other", "known"))
    with pytest.raises(InvalidRequest, match="kind: must have a handler, and 'unknown' has none"):
        await testing.run_job(worker, NewJob("q", "unknown"))
    with pytest.raises(InvalidRequest, match="attempt: must be 1 to 20, the job's max_attempts, not 21"):
        await testing.run_job(worker, NewJob("q", "known"), attempt=21)


# ── Enqueues ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_enqueued_is_found_by_what_it_has(client: testing.RecordingClient) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    await client.enqueue("mails", "send", {"to": "ada", "n": 1}, delay=60, attributes={"campaign": "7"})
    await asyncio.gather(*(client.enqueue("mails", "send", {"to": name}) for name in ("bob", "eve")))
    await client.enqueue_many([NewJob("bills", "print", b"\xff", run_at=at)])
    assert [job.payload for job in client.enqueued("mails")][1:] == [b'{"to":"bob"}', b'{"to":"eve"}']
    found = testing.assert_enqueued(client, "mails", "send", {"n": 1, "to": "ada"}, delay=timedelta(minutes=1))
    assert found.attributes == {"campaign": "7"}
    assert testing.assert_enqueued(client, kind="print", run_at=at).payload == b"\xff"
    assert client.enqueued(attributes={"campaign": "8"}) == []
    with pytest.raises(AssertionError, match=r"0 enqueued jobs match, not 1; enqueued were:\n  NewJob\(queue='mails'"):
        testing.assert_enqueued(client, "mails", "send", {"to": "mallory"})
    with pytest.raises(AssertionError, match="3 enqueued jobs match"):
        testing.assert_enqueued(client, "mails")
    client.clear()
    with pytest.raises(AssertionError, match="enqueued were: nothing"):
        testing.assert_enqueued(client)


async def test_a_job_that_a_router_would_refuse_is_refused_and_none_of_its_call_is_kept(
    client: testing.RecordingClient,
) -> None:
    with pytest.raises(InvalidJob, match=r"jobs\[0\]\.template\.queue: ") as refused:
        await client.enqueue("two words", "k")
    assert [violation.field for violation in refused.value.violations] == ["jobs[0].template.queue"]
    good, bad = NewJob("q", "k"), NewJob("q", "k", priority=10)
    with pytest.raises(InvalidJob, match=r"jobs\[1\]\.template\.priority"):
        await client.enqueue_many([good, bad])
    assert not client.jobs
    stored = await client.enqueue_many([bad, good], independent=True)
    assert [one.error is None for one in stored] == [False, True]
    assert [job.id for job in client.jobs] == [good.id]
    # These two enqueues share a call.
    told = await asyncio.gather(
        client.enqueue("q", "k", priority=10), client.enqueue("q", "fine"), return_exceptions=True
    )
    assert [type(one) for one in told] == [InvalidJob, Enqueued]
    with pytest.raises(InvalidRequest, match="org: must not have control characters"):
        await client.for_org("a\nb").enqueue("q", "k")


async def test_a_known_id_or_key_is_a_duplicate(client: testing.RecordingClient) -> None:
    first = await client.enqueue("q", "k", "1", id=uuid7(), dedup_key="a", delay=60)
    again = await client.enqueue("q", "k", "2", id=first.id)
    assert again == Enqueued(id=first.id, duplicate=True, state=JobState.SCHEDULED, differs=True)
    keyed = await client.enqueue("q", "k", "3", dedup_key="a")
    assert keyed == Enqueued(id=first.id, duplicate=True, state=JobState.SCHEDULED)
    for other in ({"queue": "other"}, {"dedup_while_live": True}):
        options = {"queue": "q", "kind": "k", "dedup_key": "a", **other}
        assert not (await client.enqueue(**options)).duplicate  # type: ignore[arg-type]
    assert len(client.jobs) == 3


async def test_orgs_are_kept_apart_and_middleware_is_called(client: testing.RecordingClient) -> None:
    other = client.for_org("globex")
    await other.enqueue("q", "k")
    assert (len(client.jobs), len(other.jobs)) == (0, 1)


async def test_a_batch_is_recorded_and_every_other_call_is_refused(client: testing.RecordingClient) -> None:
    done = await client.enqueue_batch((NewJob("q", "k") for _ in range(2500)), batch=uuid7())
    assert (done.jobs, len(client.jobs)) == (2500, 2500)
    with pytest.raises(NotImplementedError, match="Dequeue: a RecordingClient stores nothing"):
        await client.dequeue("q")
    with pytest.raises(NotImplementedError, match=r"use windrow\.testing\.run_job"):
        await Worker(client, "q").run()


def test_code_without_an_event_loop_is_tested_too() -> None:
    def welcome(client: SyncClient) -> None:
        client.enqueue("mails", "send", {"to": "ada"})

    with testing.RecordingSyncClient(org="acme") as client:
        welcome(client)
        testing.assert_enqueued(client, "mails", "send", {"to": "ada"})
        assert len(client.jobs) == 1
        client.clear()
        assert not client.enqueued()


def test_a_recording_client_may_be_used_in_several_event_loops() -> None:
    client = testing.RecordingClient(org="acme")
    for _ in range(2):
        asyncio.run(client.enqueue("q", "k"))
    assert len(client.jobs) == 2


def test_the_tests_of_the_readme_pass() -> None:
    text = (Path(__file__).parents[2] / "clients" / "python" / "README.md").read_text()
    (example,) = re.findall(r"^## Tests of your own\n.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    tests = [test for name, test in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
