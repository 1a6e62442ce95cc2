"""Tests workflows with a real router: the calls, the Python client, the workers, and the causes why a job does not
run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Generator, Sequence
from datetime import timedelta

import grpc
import pytest

import windrow
from shard.vocabulary import OrgId
from tests.conftest import SHARD
from tests.routers import PATIENCE_S, Routers, Stubs, running_routers, stubs, write_cluster
from windrow.ids import uuid7
from windrow.v1 import admin_pb2
from windrow.v1 import workflows_pb2 as pb


@pytest.fixture(scope="module")
def routers(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("workflows") / "cluster.toml", {SHARD: module_dsn})
    with running_routers(config, processes=2) as running:
        yield running


@pytest.fixture(scope="module")
def router(routers: Routers) -> Generator[Stubs, None, None]:
    with stubs(routers.address) as opened:
        yield opened


@pytest.fixture
async def client(routers: Routers, org: OrgId) -> AsyncGenerator[windrow.Client, None]:
    async with windrow.Client(routers.address, org=org) as opened:
        yield opened


async def until_ended(client: windrow.Client, workflow: str) -> windrow.WorkflowRecord:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            record, _ = await client.get_workflow(workflow)
            if record.state is not windrow.WorkflowState.RUNNING:
                return record
            await asyncio.sleep(0.02)


async def test_a_workflow_runs_through_workers(client: windrow.Client, org: OrgId) -> None:
    worker = windrow.Worker(client, ["crawl", "ops"])
    seen: list[str] = []

    @worker.handler("fetch")
    async def fetch(job: windrow.Job) -> bytes:
        page = job.json()["page"]
        if page == 3:
            raise windrow.Kill("no such page")
        return str(page).encode()

    @worker.handler("index")
    async def index(job: windrow.Job) -> None:
        parents = await client.parents(job)
        seen.extend(f"{parent.state.value} {parent.result.decode()}" for parent in parents)

    @worker.handler("page_someone")
    async def page_someone(_: windrow.Job) -> None:
        seen.append("paged")

    flow = windrow.Workflow("nightly", org=org)
    pages = [flow.job("crawl", "fetch", {"page": number}) for number in range(5)]
    flow.job("crawl", "index", after=pages, on_failed=windrow.IGNORE)
    flow.on_failure("ops", "page_someone")
    running = asyncio.create_task(worker.run())
    started = await client.start(flow)
    record = await until_ended(client, started.id)
    assert record.state is windrow.WorkflowState.SUCCEEDED
    assert seen == [f"succeeded {page}" if page != 3 else "failed " for page in range(5)]
    nodes = await client.list_nodes(started.id)
    assert [node.name for node in nodes] == ["fetch", *(f"fetch-{n}" for n in range(2, 6)), "index", "page_someone"]
    assert nodes[5].after == dict.fromkeys((node.name for node in nodes[:5]), windrow.IGNORE)
    assert nodes[6].callback is windrow.Callback.ON_FAILURE
    assert nodes[6].state is windrow.NodeState.CANCELLED
    assert {name: node.job_id for name, node in zip(started.job_ids, nodes, strict=True)} == started.job_ids
    running.cancel()
    await asyncio.wait({running})


async def test_a_started_workflow_is_known(client: windrow.Client, routers: Routers, org: OrgId) -> None:
    flow = windrow.Workflow("twice")
    flow.job("q", "k")
    assert not (await client.start(flow)).duplicate
    again = await client.start(flow)
    assert again.duplicate
    other = windrow.Workflow("twice", id=flow.id)
    other.job("q", "another")
    # The client raises the refusal at once, because another try would be refused too.
    async with windrow.Client(routers.address, org=org, timeout=3600) as patient:
        with pytest.raises(windrow.AlreadyExists):
            await patient.start(other)
    assert [record.id for record in await client.list_workflows()] == [flow.id]
    assert await client.list_workflows(state=windrow.WorkflowState.FAILED) == []


async def test_a_bad_graph_is_refused_with_its_fault(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    first = flow.job("q", "k", name="first")
    second = flow.job("q", "k", name="second", after=first)
    first.after(second)
    with pytest.raises(windrow.InvalidRequest, match=r"waits for itself: .*first.*second"):
        await client.start(flow)
    old = windrow.Workflow(id="01000000-0000-7000-8000-000000000000")
    old.job("q", "k")
    with pytest.raises(windrow.InvalidRequest, match=r"id: .* was made at 2004") as refused:
        await client.start(old)
    assert [violation.field for violation in refused.value.violations] == ["id"]
    with pytest.raises(windrow.InvalidRequest, match="the client is of org"):
        await client.start(windrow.Workflow(org="another"))
    assert await client.list_workflows() == []


async def test_a_node_that_cannot_be_sent_is_named_by_its_place_in_the_workflow(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.job("q", "k")
    flow.job("q", "k", priority=0)
    with pytest.raises(windrow.InvalidJob, match=r"^nodes\[1\]\.job\.template\.priority: must be 1 to 9") as refused:
        await client.start(flow)
    assert [violation.field for violation in refused.value.violations] == ["nodes[1].job.template.priority"]
    with pytest.raises(windrow.InvalidRequest, match=r"^timeout: '3d' is neither"):
        flow.signal("approved", "q", timeout="3d")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    wrong = windrow.Workflow()
    wrong.job("q", "k", after="k", on_failed="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(windrow.InvalidRequest, match=r"must be windrow\.CANCEL, IGNORE or RUN_ANYWAY, not 'ignore'"):
        await client.start(wrong)
    assert await client.list_workflows() == []


async def test_a_node_of_another_workflow_is_refused_although_a_node_here_has_its_name(client: windrow.Client) -> None:
    other, flow = windrow.Workflow("other"), windrow.Workflow("flow")
    there, _ = other.job("q", "fetch"), flow.job("q", "fetch")
    with pytest.raises(
        windrow.InvalidRequest, match="after: node 'fetch' is of another Workflow or Nodes than node 'k'"
    ):
        flow.job("q", "k", after=there)
    first, second = windrow.Nodes(), windrow.Nodes()
    with pytest.raises(windrow.InvalidRequest, match="give its name"):
        second.job("q", "k", after=[first.job("q", "fetch")])


async def test_only_a_leased_job_of_a_workflow_adds_nodes_and_is_told_so(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.job("q", "k", name="last", after=flow.job("q", "k", name="first"))
    started = await client.start(flow)
    (record,) = (await client.get_jobs([started.job_ids["last"]])).values()
    nodes = windrow.Nodes()
    node = nodes.job("q", "k")
    for call in (client.add_nodes, client.wait_for):
        with pytest.raises(windrow.InvalidRequest, match=r"job: must be the Job that .* got, not a JobRecord"):
            await call(record, nodes)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    # Any caller may read the results.
    assert [parent.name for parent in await client.parents(record)] == ["first"]
    (job,) = await client.dequeue("q")
    for call in (client.add_nodes, client.wait_for):
        with pytest.raises(windrow.InvalidRequest, match=r"nodes: must be a windrow\.Nodes, not a list"):
            await call(job, [node])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await client.enqueue("alone", "k")
    (alone,) = await client.dequeue("alone")
    with pytest.raises(windrow.InvalidRequest, match=f"job: {alone.id} is in no workflow: start it as"):
        await client.wait_for(alone, nodes)
    assert len(await client.list_nodes(started.id)) == 2


async def test_a_blocked_job_says_what_it_waits_for(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    parents = [flow.job("q", "k", name=f"p{number}") for number in range(12)]
    flow.job("q", "k", name="last", after=parents)
    flow.on_end("q", "k", name="over")
    started = await client.start(flow)
    explained = await client.explain_job(started.job_ids["last"])
    assert explained.state is windrow.JobState.BLOCKED
    cause = explained.causes[0]
    assert (cause.name, cause.figures["left"], len(cause.figures["waits_for"])) == ("blocked", 12, 10)  # type: ignore[arg-type]
    assert "node 'last'" in str(cause)
    assert "waits for 12 nodes: 'p0'" in str(cause)
    over = (await client.explain_job(started.job_ids["over"])).causes[0]
    assert "waits for the end of the workflow" in str(over)
    stats = (await client.stats()).queues["q"]
    assert (stats.blocked, stats.ready, stats.scheduled) == (2, 12, 0)
    page = await client.list_jobs(states=[windrow.JobState.BLOCKED])
    assert {job.id for job in page.jobs} == {started.job_ids[name] for name in ("last", "over")}
    assert all(job.workflow is not None and job.workflow.workflow_id == flow.id for job in page.jobs)


async def test_a_cancelled_workflow_tells_its_workers(client: windrow.Client) -> None:
    worker = windrow.Worker(client, "q")
    begun, lost = asyncio.Event(), asyncio.Event()

    @worker.handler("long")
    async def long(job: windrow.Job) -> None:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            lost.set()

    flow = windrow.Workflow()
    flow.job("q", "rest", after=flow.job("q", "long"))
    running = asyncio.create_task(worker.run())
    started = await client.start(flow)
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        record = await client.cancel_workflow(started.id, reason="not needed")
        await lost.wait()
    assert record.state is windrow.WorkflowState.CANCELLED
    jobs = await client.get_jobs(started.job_ids.values())
    assert {job.reason for job in jobs.values()} == {"not needed"}
    running.cancel()
    await asyncio.wait({running})


async def test_a_workflow_that_ended_in_its_pause_is_paused_while_a_callback_waits(client: windrow.Client) -> None:
    flow, quiet = windrow.Workflow(), windrow.Workflow()
    flow.job("q", "k", name="only")
    flow.on_success("q", "told", name="told")
    flow.on_failure("q", "k", name="mourned")
    quiet.job("q", "k", name="only")
    quiet.on_failure("q", "k", name="mourned")
    for one in (flow, quiet):
        started = await client.start(one)
        await client.pause_workflow(one.id)
        (job,) = await client.dequeue("q")
        assert job.id == started.job_ids["only"]
        await client.ack(job)
    record = await until_ended(client, flow.id)
    assert (record.state, record.paused) == (windrow.WorkflowState.SUCCEEDED, True)
    assert not (await until_ended(client, quiet.id)).paused
    listed = await client.list_workflows()
    assert {one.id: one.paused for one in listed} == {flow.id: True, quiet.id: False}
    assert not (await client.resume_workflow(flow.id)).paused
    (job,) = await client.dequeue("q")
    assert job.kind == "told"


async def test_nodes_are_skipped_and_workflows_paused(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.job("q", "k", name="last", after=flow.job("q", "k", name="first"))
    started = await client.start(flow)
    assert (await client.pause_workflow(started.id)).paused
    await client.skip_node(started.id, "first")
    record, counts = await client.get_workflow(started.id)
    assert (record.paused, counts[windrow.NodeState.SKIPPED], counts[windrow.NodeState.BLOCKED]) == (True, 1, 1)
    assert not (await client.resume_workflow(started.id)).paused
    (job,) = await client.dequeue("q")
    assert job.id == started.job_ids["last"]
    await client.ack(job)
    assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
    await client.skip_node(started.id, "first")
    with pytest.raises(windrow.FailedPrecondition):
        await client.skip_node(started.id, "last")
    with pytest.raises(windrow.NotFound):
        await client.skip_node(uuid7(), "first")


async def test_a_handler_adds_nodes_and_callbacks_wait_for_them(client: windrow.Client) -> None:
    worker = windrow.Worker(client, "crawl")
    ran: list[str] = []
    added: list[windrow.Added] = []
    is_told = asyncio.Event()

    @worker.handler("list_pages")
    async def list_pages(job: windrow.Job) -> None:
        assert job.workflow is not None
        more = windrow.Nodes()
        pages = [more.job("crawl", "fetch", {"page": number}) for number in range(3)]
        more.job("crawl", "index", name="index", after=pages)
        added.append(await job.workflow.add(more))
        # This attempt and the next attempt repeat the call with the same nodes.
        added.append(await job.workflow.add(more))
        if job.attempt == 1:
            raise windrow.Retry("once more", after=0)
        another = windrow.Nodes()
        another.job("crawl", "fetch", {"page": 9}, after="index")
        added.append(await job.workflow.add(another))

    @worker.handler("fetch")
    async def fetch(job: windrow.Job) -> None:
        ran.append(f"page {job.json()['page']}")

    @worker.handler("index")
    async def index(_: windrow.Job) -> None:
        ran.append("index")

    @worker.handler("tell")
    async def tell(_: windrow.Job) -> None:
        ran.append("told")
        is_told.set()

    flow = windrow.Workflow("site")
    flow.job("crawl", "list_pages")
    flow.on_success("crawl", "tell")
    running = asyncio.create_task(worker.run())
    started = await client.start(flow)
    assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
    await asyncio.wait_for(is_told.wait(), PATIENCE_S)
    assert sorted(ran[:3]) == ["page 0", "page 1", "page 2"]
    assert ran[3:] == ["index", "page 9", "told"]
    assert [one.stored for one in added] == [4, 0, 0, 0, 1]
    assert list(added[0].job_ids) == ["fetch", "fetch-2", "fetch-3", "index"]
    assert added[0].job_ids == added[1].job_ids == added[2].job_ids
    record, _ = await client.get_workflow(started.id)
    assert record.nodes == 6
    names = ["list_pages", "tell", "0.1.fetch", "0.1.fetch-2", "0.1.fetch-3", "index", "0.2.fetch"]
    assert [node.name for node in await client.list_nodes(started.id)] == names
    running.cancel()
    await asyncio.wait({running})


async def test_a_def_handler_that_would_add_nodes_in_vain_is_told_so(client: windrow.Client) -> None:
    worker = windrow.Worker(client, "crawl")
    told: list[str] = []

    @worker.handler("list_pages")
    def list_pages(job: windrow.Job) -> None:
        assert job.workflow is not None
        more = windrow.Nodes()
        more.job("crawl", "fetch")
        try:
            # A handler that is a plain `def` function cannot await this call.
            job.workflow.add(more)
        except RuntimeError as error:
            told.append(str(error))

    flow = windrow.Workflow()
    flow.job("crawl", "list_pages")
    running = asyncio.create_task(worker.run())
    started = await client.start(flow)
    await until_ended(client, started.id)
    running.cancel()
    await asyncio.wait({running})
    assert told == ["only an async handler of a Worker can do this by job.workflow: use add_nodes of a client"]


async def test_a_worker_leaves_no_job_of_a_workflow_to_the_garbage_collector(client: windrow.Client) -> None:
    """Payloads may be large. But the garbage collector runs after a number of new objects, whatever the size of the
    objects."""
    worker = windrow.Worker(client, "crawl")

    @worker.handler("fetch")
    async def fetch(_: windrow.Job) -> None:
        pass

    flow = windrow.Workflow()
    for _ in range(20):
        flow.job("crawl", "fetch", bytes(1000))
    started = await client.start(flow)
    gc.collect()
    gc.disable()
    try:
        running = asyncio.create_task(worker.run())
        await until_ended(client, started.id)
        running.cancel()
        await asyncio.wait({running})
        assert [one for one in gc.get_objects() if isinstance(one, windrow.Job)] == []
    finally:
        gc.enable()


async def test_a_dequeued_job_adds_nodes_by_the_client_until_its_lease_has_ended(
    client: windrow.Client, routers: Routers
) -> None:
    flow = windrow.Workflow()
    flow.job("q", "k")
    flow.on_end("q", "tell")
    await client.start(flow)
    (job,) = await client.dequeue("q")
    assert job.workflow is not None
    nodes = windrow.Nodes()
    nodes.job("q", "k", name="x")
    with pytest.raises(RuntimeError, match="use add_nodes of a client"):
        await job.workflow.add(nodes)
    with windrow.SyncClient(routers.address, org=client.org) as blocking:
        added = await asyncio.to_thread(blocking.add_nodes, job, nodes)
    assert added.stored == 1
    assert await client.add_nodes(job, nodes) == windrow.Added(job_ids=added.job_ids, stored=0)
    await client.ack(job)
    (job,) = await client.dequeue("q")
    taken = windrow.Nodes()
    taken.job("q", "k", name="x")
    with pytest.raises(windrow.AlreadyExists, match="that this job has not added"):
        await client.add_nodes(job, taken)
    nobody = windrow.Nodes()
    nobody.job("q", "k", name="y", after="nobody")
    with pytest.raises(windrow.NotFound, match="has no node 'nobody'"):
        await client.add_nodes(job, nobody)
    after_callback = windrow.Nodes()
    after_callback.job("q", "k", name="y", after="tell")
    with pytest.raises(windrow.NotFound, match="'tell' that a node can wait for: it is a callback"):
        await client.add_nodes(job, after_callback)
    await client.ack(job)
    late = windrow.Nodes()
    late.job("q", "k", name="late")
    with pytest.raises(windrow.FailedPrecondition, match="has ended, or the job is not in workflow"):
        await client.add_nodes(job, late)


async def test_ten_thousand_nodes_are_the_most_that_a_workflow_gets(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.job("q", "first")
    flow.on_end("ops", "tell")
    started = await client.start(flow)
    (job,) = await client.dequeue("q")
    for _ in range(9):
        assert (await client.add_nodes(job, some_nodes(1_000))).stored == 1_000
    with pytest.raises(windrow.ResourceExhausted, match="has 9,002 nodes, and 999 more would exceed the 10,000"):
        await client.add_nodes(job, some_nodes(999))
    assert (await client.add_nodes(job, some_nodes(998))).stored == 998
    assert (await client.get_workflow(started.id))[0].nodes == 9_999
    assert len(await client.list_nodes(started.id)) == 10_000


async def test_one_call_adds_at_most_a_thousand_nodes_with_ten_thousand_edges(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    parents = [flow.job("other", "k", name=f"p{number}") for number in range(11)]
    flow.job("q", "first")
    started = await client.start(flow)
    (job,) = await client.dequeue("q")
    with pytest.raises(windrow.InvalidRequest, match="nodes: must have at most 1,000 items, not 1,001"):
        await client.add_nodes(job, some_nodes(1_001))
    with pytest.raises(windrow.InvalidRequest, match="must wait for at most 10,000 others together, not 11,000"):
        await client.add_nodes(job, some_nodes(1_000, after=[f"p{number}" for number in range(11)]))
    assert (await client.get_workflow(started.id))[0].nodes == len(parents) + 1
    assert (
        await client.add_nodes(job, some_nodes(1_000, after=[f"p{number}" for number in range(10)]))
    ).stored == 1_000


def some_nodes(count: int, *, after: Sequence[str] = ()) -> windrow.Nodes:
    nodes = windrow.Nodes()
    for _ in range(count):
        nodes.job("q", "k", after=after)
    return nodes


async def test_ten_thousand_nodes_start_and_are_listed(client: windrow.Client) -> None:
    flow = windrow.Workflow("large")
    nodes = [flow.job("wide", "k") for _ in range(9_999)]
    flow.job("wide", "k", name="last", after=nodes)
    started = await client.start(flow)
    listed = await client.list_nodes(started.id)
    assert len(listed) == 10_000
    assert len(listed[-1].after) == 9_999
    record, counts = await client.get_workflow(started.id)
    assert (record.nodes, counts[windrow.NodeState.RELEASED], counts[windrow.NodeState.BLOCKED]) == (10_000, 9_999, 1)
    assert (await client.cancel_workflow(started.id)).state is windrow.WorkflowState.CANCELLED


def test_the_parents_of_another_orgs_node_are_not_told(router: Stubs, org: OrgId, other_org: OrgId) -> None:
    flow = windrow.Workflow()
    flow.job("q", "k", name="last", after=flow.job("q", "k", name="first"))
    router.workflows.StartWorkflow(flow.request(org), timeout=PATIENCE_S)
    mine = router.workflows.ListParents(pb.ListParentsRequest(org=org, id=flow.id, node=1), timeout=PATIENCE_S)
    assert [parent.name for parent in mine.parents] == ["first"]
    theirs = router.workflows.ListParents(pb.ListParentsRequest(org=other_org, id=flow.id, node=1), timeout=PATIENCE_S)
    assert list(theirs.parents) == []
    with pytest.raises(grpc.RpcError) as refused:
        router.workflows.GetWorkflow(pb.GetWorkflowRequest(org=other_org, id=flow.id), timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    purged = router.admin.PurgeQueue(admin_pb2.PurgeQueueRequest(org=org, queue="q"), timeout=PATIENCE_S)
    assert purged.cancelled == 2


async def until_released(client: windrow.Client, workflow: str, name: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            states = {node.name: node.state for node in await client.list_nodes(workflow)}
            if states[name] is windrow.NodeState.RELEASED:
                return
            await asyncio.sleep(0.02)


# ── Signals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_workflow_waits_for_a_signal_and_passes_its_payload_on(
    client: windrow.Client, routers: Routers
) -> None:
    worker = windrow.Worker(client, "ci")
    seen: list[object] = []

    @worker.handler("build", "signal")
    async def build(job: windrow.Job) -> None:
        seen.append(job.kind)

    @worker.handler("deploy")
    async def deploy(job: windrow.Job) -> None:
        (parent,) = await client.parents(job)
        seen.append((parent.name, parent.state.value, parent.result))

    flow = windrow.Workflow("release")
    built = flow.job("ci", "build")
    approved = flow.signal("approved", "ci", after=built, timeout=timedelta(days=3), payload="who may do so")
    flow.job("ci", "deploy", after=approved)
    running = asyncio.create_task(worker.run())
    started = await client.start(flow)
    await until_released(client, started.id, "approved")
    cause = (await client.explain_job(started.job_ids["approved"])).causes[0]
    assert cause.name == "signal"
    assert str(cause).startswith(f"node 'approved' of workflow {flow.id} waits for a signal until ")
    watched = asyncio.create_task(client.wait(started.job_ids["approved"], timeout=PATIENCE_S))
    with windrow.SyncClient(routers.address, org=client.org) as blocking:
        assert await asyncio.to_thread(blocking.signal, started.id, "approved", {"by": "ann"})
    assert (await asyncio.wait_for(watched, PATIENCE_S)).result == b'{"by":"ann"}'
    assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
    assert not await client.signal(started.id, "approved", {"by": "bob"})
    assert seen == ["build", ("approved", "succeeded", b'{"by":"ann"}')]
    assert [node.is_signal for node in await client.list_nodes(started.id)] == [False, True, False]
    for name in ("build", "nobody"):
        with pytest.raises(windrow.FailedPrecondition if name == "build" else windrow.NotFound):
            await client.signal(started.id, name)
    with pytest.raises(windrow.NotFound):
        await client.signal(uuid7(), "approved")
    with pytest.raises(windrow.InvalidRequest, match="payload"):
        await client.signal(started.id, "approved", bytes(64 * 1024 + 1))
    with pytest.raises(windrow.InvalidRequest, match="payload"):
        await client.signal(started.id, "approved", float("nan"))
    running.cancel()
    await asyncio.wait({running})


async def test_a_blocked_node_says_whether_it_has_its_signal_already(client: windrow.Client) -> None:
    flow = windrow.Workflow("release")
    flow.signal("approved", "ci", after=flow.job("ci", "build"), timeout=timedelta(days=3))
    started = await client.start(flow)

    async def why() -> str:
        (cause,) = (await client.explain_job(started.job_ids["approved"])).causes
        return str(cause)

    assert await why() == f"node 'approved' of workflow {flow.id} waits for 1 node: 'build'"
    assert await client.signal(flow.id, "approved")
    assert await why() == f"node 'approved' of workflow {flow.id} has its signal, and waits for 1 node: 'build'"


async def test_a_blocked_node_does_not_say_whether_a_node_of_another_org_has_its_signal(
    client: windrow.Client, routers: Routers, other_org: OrgId
) -> None:
    flow = windrow.Workflow()
    flow.signal("approved", "ci", after=flow.job("ci", "build"), timeout=timedelta(days=3))
    started = await client.start(flow)
    async with windrow.Client(routers.address, org=other_org) as other:
        # Both workflows have the same id, so the jobs of both orgs have the same ids too.
        assert (await other.start(flow)).job_ids == started.job_ids
        assert await client.signal(flow.id, "approved")
        (cause,) = (await other.explain_job(started.job_ids["approved"])).causes
        assert str(cause) == f"node 'approved' of workflow {flow.id} waits for 1 node: 'build'"
        await other.cancel_workflow(flow.id)
    await client.cancel_workflow(flow.id)


async def test_a_worker_that_waits_for_jobs_ends_a_node_whose_time_is_over(client: windrow.Client) -> None:
    worker = windrow.Worker(client, "ci")
    seen: list[str] = []
    has_mourned = asyncio.Event()

    @worker.handler("mourn", "signal")
    async def mourn(job: windrow.Job) -> None:
        seen.append(job.kind)
        has_mourned.set()

    flow = windrow.Workflow()
    flow.job("ci", "deploy", after=flow.signal("approved", "ci", timeout=0.2))
    flow.on_failure("ci", "mourn")
    running = asyncio.create_task(worker.run())
    started = await client.start(flow)
    assert (await until_ended(client, started.id)).state is windrow.WorkflowState.FAILED
    await asyncio.wait_for(has_mourned.wait(), PATIENCE_S)
    assert seen == ["mourn"]
    (job,) = (await client.get_jobs([started.job_ids["approved"]])).values()
    assert (job.state, job.reason, job.attempts) == (windrow.JobState.CANCELLED, "no signal came in time", [])
    causes = (await client.explain_job(started.job_ids["approved"])).causes
    assert [cause.name for cause in causes] == ["expired", "finished"]
    with pytest.raises(windrow.FailedPrecondition, match="no signal came in time") as refused:
        await client.signal(started.id, "approved")
    assert refused.value.reason == "NOT_SIGNALLED"
    running.cancel()
    await asyncio.wait({running})


async def test_a_node_whose_queue_nobody_consumes_says_so(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.signal("approved", "nobody", timeout=3600)
    started = await client.start(flow)
    explained = await client.explain_job(started.job_ids["approved"])
    assert [cause.name for cause in explained.causes] == ["signal", "no_consumer"]
    assert explained.state is windrow.JobState.SCHEDULED


async def test_a_job_that_waited_for_a_signal_is_not_restored(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.signal("signalled", "ci", timeout=3600)
    flow.signal("cancelled", "ci", timeout=3600)
    flow.signal("too late", "ci", timeout=0.01)
    flow.signal("early", "ci", after=flow.job("ci", "build"), timeout=3600)
    jobs = (await client.start(flow)).job_ids
    assert await client.signal(flow.id, "signalled")
    assert await client.signal(flow.id, "early")
    await client.cancel_jobs([jobs["cancelled"]])
    (build,) = await client.dequeue("ci", wait=PATIENCE_S)
    await client.ack([build])
    async with asyncio.timeout(PATIENCE_S):
        while (await client.get_jobs([jobs["too late"]]))[jobs["too late"]].state is not windrow.JobState.CANCELLED:
            await client.dequeue("ci", wait=0.05)
    names = ("signalled", "cancelled", "too late", "early", "build")
    restored = await client.restore_jobs([jobs[name] for name in names])
    refused = windrow.RestoreRefusal.SIGNAL
    assert [one.refusal for one in restored] == [refused, refused, refused, refused, None]
    assert [job.kind for job in await client.dequeue("ci", max_jobs=10)] == ["build"]


def test_another_org_gives_no_signal(router: Stubs, org: OrgId, other_org: OrgId) -> None:
    flow = windrow.Workflow()
    flow.signal("approved", "q", timeout=3600)
    router.workflows.StartWorkflow(flow.request(org), timeout=PATIENCE_S)
    request = pb.SignalNodeRequest(org=other_org, id=flow.id, node="approved")
    with pytest.raises(grpc.RpcError) as refused:
        router.workflows.SignalNode(request, timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    request.org = org
    assert router.workflows.SignalNode(request, timeout=PATIENCE_S).accepted
