"""Tests retries of workflows with a real router: what runs again, what is taken over, and what is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

import psycopg
import pytest

import windrow
from shard.history import days
from shard.postgres.pool import Database
from shard.vocabulary import OrgId
from tests.conftest import SHARD
from tests.effort import luck_of, trials
from tests.integration.test_workflows_calls import until_ended
from tests.routers import Routers, running_routers, write_cluster
from tests.timemachine import age_finished
from windrow.ids import uuid7

luck = luck_of("retries")


@pytest.fixture(scope="module")
def routers(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("retries") / "cluster.toml", {SHARD: module_dsn})
    with running_routers(config) as running:
        yield running


@pytest.fixture
async def client(routers: Routers, org: OrgId) -> AsyncGenerator[windrow.Client, None]:
    async with windrow.Client(routers.address, org=org) as opened:
        yield opened


async def work(client: windrow.Client, dies: Sequence[str] = (), *, seen: list[str] | None = None) -> None:
    """Works until no job is ready. Acks each job with the job's payload as its result, or kills the job if `dies` names
    it."""
    while jobs := await client.dequeue("q", max_jobs=100, wait=0):
        for job in jobs:
            if seen is not None:
                seen.append(job.text())
            if job.text() in dies:
                await client.nack(job, error="it is broken", permanent=True)
            else:
                await client.ack(job, result=job.payload)


def diamond() -> windrow.Workflow:
    """a → b, c → d, and a callback for each end."""
    flow = windrow.Workflow("diamond")
    a = flow.job("q", "k", "a", name="a", attributes={"of": "a"})
    b = flow.job("q", "k", "b", name="b", after=a)
    c = flow.job("q", "k", "c", name="c", after=a)
    flow.job("q", "k", "d", name="d", after=[b, c])
    flow.on_success("q", "k", "success", name="success")
    flow.on_failure("q", "k", "failure", name="failure")
    flow.on_end("q", "k", "end", name="end")
    return flow


async def states(client: windrow.Client, workflow: str) -> Mapping[str, str]:
    return {node.name: node.state.value for node in await client.list_nodes(workflow)}


async def failed(client: windrow.Client, dies: Sequence[str] = ("b",)) -> windrow.Started:
    """Starts a diamond, makes it fail, and runs its callbacks."""
    started = await client.start(diamond())
    await work(client, dies)
    record, _ = await client.get_workflow(started.id)
    assert record.state is windrow.WorkflowState.FAILED
    return started


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_workflow_that_runs_or_has_succeeded_is_refused(client: windrow.Client) -> None:
    started = await client.start(diamond())
    with pytest.raises(windrow.FailedPrecondition, match="cannot be retried: it still runs"):
        await client.retry_workflow(started.id)
    await work(client)
    with pytest.raises(windrow.FailedPrecondition, match="cannot be retried: it has succeeded"):
        await client.retry_workflow(started.id)
    with pytest.raises(windrow.NotFound):
        await client.retry_workflow(uuid7())


async def test_the_workflow_of_another_org_is_unknown(
    client: windrow.Client, routers: Routers, other_org: OrgId
) -> None:
    started = await failed(client)
    async with windrow.Client(routers.address, org=other_org) as stranger:
        with pytest.raises(windrow.NotFound):
            await stranger.retry_workflow(started.id)


async def test_a_workflow_is_retried_once_and_its_retry_after_that(client: windrow.Client) -> None:
    started = await failed(client)
    both = await asyncio.gather(*(client.retry_workflow(started.id) for _ in range(2)), return_exceptions=True)
    (retry,) = [one for one in both if isinstance(one, windrow.WorkflowRecord)]
    (refused,) = [one for one in both if isinstance(one, BaseException)]
    assert isinstance(refused, windrow.FailedPrecondition)
    assert f"workflow {retry.id} retries it" in str(refused)
    await work(client, ["b"])
    again = await client.retry_workflow(retry.id)
    assert again.retry_of == retry.id
    await work(client)
    assert (await client.get_workflow(again.id))[0].state is windrow.WorkflowState.SUCCEEDED


async def test_the_id_of_another_workflow_is_refused(client: windrow.Client) -> None:
    started = await failed(client)
    with pytest.raises(windrow.AlreadyExists):
        await client.retry_workflow(started.id, new_id=started.id)
    assert (await states(client, started.id))["b"] == "failed"


async def test_nodes_that_would_wait_for_each_other_in_the_retry_are_refused(client: windrow.Client) -> None:
    """`b` waits for `a`, and `y` waits for `b`. After `y` was cancelled, it has ended, so `a` may wait for a node that
    waits for `y`. But in the retry, `y` has not ended."""
    flow = windrow.Workflow()
    a = flow.job("q", "k", "a", name="a")
    flow.job("q", "k", "b", name="b", after=a)
    started = await client.start(flow)
    (job,) = await client.dequeue("q")
    y, x = windrow.Nodes(), windrow.Nodes()
    y.job("q", "k", "y", name="y", after="b")
    await client.cancel_jobs([(await client.add_nodes(job, y)).job_ids["y"]])
    x.job("q", "k", "x", name="x", after="y", on_failed=windrow.RUN_ANYWAY)
    with pytest.raises(windrow.Waiting):
        await client.wait_for(job, x)
    await work(client, ["x"])
    assert await states(client, started.id) == dict.fromkeys("aby", "cancelled") | {"x": "failed"}
    with pytest.raises(windrow.FailedPrecondition, match=r"would wait for each other, .*'a'.* 'x', 'y', 'b'"):
        await client.retry_workflow(started.id)


async def test_a_job_of_a_retry_does_not_wait_for_nodes_that_wait_for_it_there(client: windrow.Client) -> None:
    """As in the previous test, but in the old workflow `a` waits for nothing. In the retry, `x` waits for `t`, `t` for
    `y`, `y` for `b`, and `b` for `a`."""
    flow = windrow.Workflow()
    a = flow.job("q", "k", "a", name="a")
    flow.job("q", "k", "b", name="b", after=a)
    started = await client.start(flow)
    (job,) = await client.dequeue("q")
    y, x, t = windrow.Nodes(), windrow.Nodes(), windrow.Nodes()
    y.job("q", "k", "y", name="y", after="b")
    await client.cancel_jobs([(await client.add_nodes(job, y)).job_ids["y"]])
    x.job("q", "k", "x", name="x")
    await client.add_nodes(job, x)
    t.job("q", "k", "t", name="t", after="y", on_failed=windrow.RUN_ANYWAY)
    (other,) = await client.dequeue("q")
    with pytest.raises(windrow.Waiting):
        await client.wait_for(other, t)
    await client.nack(job, permanent=True)
    await work(client, ["t"])
    retry = await client.retry_workflow(started.id)
    (again,) = await client.dequeue("q")
    with pytest.raises(windrow.InvalidRequest, match=r"waits for node 't', so .* cannot wait for node 'y'"):
        await client.wait_for(again, x)
    await client.ack(again)
    await work(client)
    assert (await client.get_workflow(retry.id))[0].state is windrow.WorkflowState.SUCCEEDED


async def test_jobs_that_would_take_more_memory_than_a_request_are_refused(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.job("q", "k", name="first")
    started = await client.start(flow)
    (job,) = await client.dequeue("q")
    for call in range(2):
        nodes = windrow.Nodes()
        for number in range(9):
            nodes.job("large", "k", bytes(1024 * 1024 - 1024), name=f"{call}.{number}")
        await client.add_nodes(job, nodes)
    await client.cancel_workflow(started.id)
    with pytest.raises(windrow.FailedPrecondition, match="would run again have more than 16,777,216 bytes together"):
        await client.retry_workflow(started.id)


async def test_a_job_that_was_redriven_and_is_live_is_refused(client: windrow.Client) -> None:
    started = await failed(client)
    await client.redrive_jobs([started.job_ids["b"]])
    with pytest.raises(windrow.FailedPrecondition, match=f"{started.job_ids['b']} of node 'b' was redriven"):
        await client.retry_workflow(started.id)
    await work(client)


# ── What is done ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_has_not_succeeded_runs_again_and_the_rest_is_taken_over(client: windrow.Client) -> None:
    started = await failed(client)
    nodes = {"a": "succeeded", "b": "failed", "c": "succeeded", "d": "cancelled"}
    callbacks = {"success": "cancelled", "failure": "succeeded", "end": "succeeded"}
    assert await states(client, started.id) == nodes | callbacks
    retry = await client.retry_workflow(started.id)
    assert (retry.name, retry.nodes, retry.retry_of) == ("diamond", 4, started.id)
    nodes |= {"b": "released", "d": "blocked"}
    assert await states(client, retry.id) == nodes | dict.fromkeys(callbacks, "blocked")
    seen: list[str] = []
    await work(client, seen=seen)
    assert seen[:2] == ["b", "d"]
    assert sorted(seen[2:]) == ["end", "success"]
    assert (await client.get_workflow(retry.id))[0].state is windrow.WorkflowState.SUCCEEDED
    # The old workflow is unchanged, and none of its jobs is dead any more.
    assert (await client.get_workflow(started.id))[0].state is windrow.WorkflowState.FAILED
    (old,) = (await client.get_jobs([started.job_ids["b"]])).values()
    assert (old.state, old.reason) == (windrow.JobState.CANCELLED, f"retried by workflow {retry.id}")
    assert [one.id for one in await client.list_workflows()] == [retry.id, started.id]


@pytest.mark.parametrize("was_moved", [False, True], ids=["", "moved by the release before"])
async def test_added_nodes_run_again_too(client: windrow.Client, module_dsn: str, was_moved: bool) -> None:
    started = await client.start(diamond())
    (job,) = await client.dequeue("q")
    nodes = windrow.Nodes()
    x = nodes.job("q", "k", "x", name="x", after="b")
    nodes.job("q", "k", "y", name="y", after=x)
    await client.add_nodes(job, nodes)
    await client.ack(job)
    await work(client, ["x"])
    if was_moved:
        # The release before did not record which job had added a node.
        async with await psycopg.AsyncConnection.connect(module_dsn, autocommit=True) as connection:
            await connection.execute("UPDATE windrow.workflow_node SET added_by = NULL")
            await connection.execute("UPDATE windrow.workflow SET added = 0")
    retry = await client.retry_workflow(started.id)
    assert retry.nodes == 6
    seen: list[str] = []
    await work(client, seen=seen)
    assert seen == ["x", "y", "success", "end"]
    listed = await client.list_nodes(retry.id)
    assert [node.name for node in listed] == ["a", "b", "c", "d", "success", "failure", "end", "x", "y"]
    assert [node.number for node in listed] == list(range(9))
    assert listed[8].after == {"x": windrow.FailurePolicy.CANCEL}
    assert (await client.get_workflow(retry.id))[0].state is windrow.WorkflowState.SUCCEEDED


async def test_a_job_that_failed_after_it_had_added_nodes_finds_them_in_the_retry(client: windrow.Client) -> None:
    """The job also looks up unnamed nodes that an added node has added. So the names of these nodes must be the same in
    the retry."""
    started = await client.start(diamond())
    named, unnamed = windrow.Nodes(), windrow.Nodes()
    named.job("q", "k", "x", name="x")
    unnamed.job("q", "k", "y")

    async def run(dies: Sequence[str]) -> tuple[list[str], list[int]]:
        seen: list[str] = []
        stored: list[int] = []
        while jobs := await client.dequeue("q", max_jobs=1, wait=0):
            (job,) = jobs
            seen.append(job.text())
            if (more := {"a": named, "x": unnamed}.get(job.text())) is not None:
                stored.append((await client.add_nodes(job, more)).stored)
            if job.text() in dies:
                await client.nack(job, error="it is broken", permanent=True)
            else:
                await client.ack(job)
        return seen, stored

    assert await run(["a", "x"]) == (["a", "x", "y", "failure", "end"], [1, 1])
    retry = await client.retry_workflow(started.id)
    assert retry.nodes == 6
    seen, stored = await run([])
    assert (sorted(seen[:-2]), stored) == (["a", "b", "c", "d", "x"], [0, 0])
    assert sorted(seen[-2:]) == ["end", "success"]
    assert (await client.get_workflow(retry.id))[0].state is windrow.WorkflowState.SUCCEEDED


@pytest.mark.thorough
async def test_with_retries_each_node_succeeds_once_whatever_was_added_and_has_failed(client: windrow.Client) -> None:
    """Jobs add named and unnamed nodes, which add nodes too, and some jobs fail afterwards. A job adds the same nodes
    each time."""
    for _ in range(trials(3, thorough=100)):
        succeeded: Counter[str] = Counter()
        children: dict[str, list[bool]] = {}
        flow = windrow.Workflow()
        for at in range(3):
            flow.job("q", "k", f"n{at}", name=f"n{at}", after=["n0"] if at == 2 else [])
        flow.on_success("q", "k", name="won")
        last = (await client.start(flow)).id
        while True:
            while jobs := await client.dequeue("q", max_jobs=3, wait=0):
                for job in jobs:
                    name = job.text()
                    if name and name.count(".") < 4 and luck.random() < 0.6:
                        children.setdefault(name, [luck.random() < 0.5 for _ in range(luck.randint(1, 3))])
                    nodes = windrow.Nodes()
                    for at, is_named in enumerate(children.get(name, ())):
                        nodes.job("q", "k", f"{name}.{at}", name=f"{name}.{at}" if is_named else "")
                    if nodes.nodes:
                        await client.add_nodes(job, nodes)
                    if name and luck.random() < 0.25:
                        await client.nack(job, permanent=True)
                    else:
                        await client.ack(job)
                        succeeded[name] += 1
            if (await client.get_workflow(last))[0].state is windrow.WorkflowState.SUCCEEDED:
                break
            last = (await client.retry_workflow(last)).id
        added = {f"{name}.{at}" for name, named in children.items() for at in range(len(named))}
        assert succeeded == Counter(["", "n0", "n1", "n2", *added])


async def test_a_node_finds_the_results_of_those_that_were_taken_over(client: windrow.Client) -> None:
    await client.retry_workflow((await failed(client, ["d"])).id)
    (job,) = await client.dequeue("q")
    assert job.text() == "d"
    assert {parent.name: parent.result for parent in await client.parents(job)} == {"b": b"b", "c": b"c"}
    await client.ack(job)
    await work(client)


async def test_a_call_that_is_repeated_stores_one_retry(client: windrow.Client) -> None:
    started, new_id = await failed(client), uuid7()
    for _ in range(2):
        assert (await client.retry_workflow(started.id, new_id=new_id)).id == new_id
    seen: list[str] = []
    await work(client, seen=seen)
    assert sorted(seen) == ["b", "d", "end", "success"]


async def test_a_cancelled_workflow_is_retried_and_a_skipped_node_stays_skipped(client: windrow.Client) -> None:
    started = await client.start(diamond())
    await client.skip_node(started.id, "a")
    await client.cancel_workflow(started.id)
    await work(client)
    retry = await client.retry_workflow(started.id)
    found = await states(client, retry.id)
    assert [found[name] for name in "abcd"] == ["skipped", "released", "released", "blocked"]
    await work(client)
    assert (await client.get_workflow(retry.id))[0].state is windrow.WorkflowState.SUCCEEDED


async def test_a_job_that_succeeded_after_a_redrive_is_taken_over(client: windrow.Client) -> None:
    started = await failed(client)
    await client.redrive_jobs([started.job_ids["b"]])
    await work(client)
    retry = await client.retry_workflow(started.id)
    found = await states(client, retry.id)
    assert (found["b"], found["d"]) == ("succeeded", "released")
    await work(client)


async def test_jobs_that_have_turned_cold_run_again(client: windrow.Client, database: Database) -> None:
    started = await failed(client, ["a"])
    finished = sorted(job for name, job in started.job_ids.items() if name != "a")
    # Aged jobs get new ids, because an id contains its time.
    for old, new in zip(finished, await age_finished(database, OrgId(client.org), days=9), strict=True):
        await database.run(
            b"UPDATE windrow.workflow_node SET job_id = %(new)s::uuid WHERE job_id = %(old)s::uuid",
            {"new": new, "old": old},
        )
    for day in await days.days_over(database):
        await days.turn_cold(database, day)
    retry = await client.retry_workflow(started.id)
    seen: list[str] = []
    await work(client, seen=seen)
    assert sorted(seen) == ["a", "b", "c", "d", "end", "success"]
    assert retry.retry_of == started.id


async def test_delays_attributes_and_groups_are_those_of_the_old_jobs(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    first = flow.job("q", "k", "first", name="first")
    flow.job("q", "k", "last", name="last", after=first, delay=3600, attributes={"of": "last"}, group="g", priority=2)
    started = await client.start(flow)
    await work(client, ["first"])
    retry = await client.retry_workflow(started.id)
    await work(client)
    (last,) = [node for node in await client.list_nodes(retry.id) if node.name == "last"]
    (job,) = (await client.get_jobs([last.job_id])).values()
    assert job.state is windrow.JobState.SCHEDULED
    assert (job.attributes, job.group, job.priority) == ({"of": "last"}, "g", 2)
    await client.cancel_workflow(retry.id)


async def test_ten_thousand_nodes_are_retried(client: windrow.Client) -> None:
    flow = windrow.Workflow("wide")
    root = flow.job("q", "k", "root", name="root")
    for _ in range(9_999):
        flow.job("wide", "k", b"x" * 100, after=root)
    started = await client.start(flow)
    await work(client, ["root"])
    await until_ended(client, started.id)
    retry = await client.retry_workflow(started.id)
    _, counts = await client.get_workflow(retry.id)
    assert (counts[windrow.NodeState.RELEASED], counts[windrow.NodeState.BLOCKED]) == (1, 9_999)
    await client.cancel_workflow(retry.id)


async def test_nodes_that_had_their_signals_are_taken_over_and_the_others_wait_again(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    first = flow.signal("first", "q", timeout=3600)
    second = flow.signal("second", "q", timeout=3600)
    early = flow.signal("early", "q", after=second, timeout=7200)
    flow.job("q", "k", "last", name="last", after=[first, early])
    started = await client.start(flow)
    assert await client.signal(started.id, "first", b"yes")
    assert await client.signal(started.id, "early", b"too early")
    await client.cancel_jobs([started.job_ids["second"]])
    assert await states(client, started.id) == {
        "first": "succeeded", "second": "cancelled", "early": "cancelled", "last": "cancelled"
    }  # fmt: skip
    retry = await client.retry_workflow(started.id)
    assert await states(client, retry.id) == {
        "first": "succeeded", "second": "released", "early": "blocked", "last": "blocked"
    }  # fmt: skip
    nodes = await client.list_nodes(retry.id)
    assert [node.is_signal for node in nodes] == [True, True, True, False]
    seen: list[str] = []
    await work(client, seen=seen)
    assert seen == []
    (job,) = (await client.get_jobs([nodes[1].job_id])).values()
    assert (job.state, job.expires_at) == (windrow.JobState.SCHEDULED, job.run_at)
    assert not await client.signal(retry.id, "first")
    assert await client.signal(retry.id, "second")
    assert await client.signal(retry.id, "early")
    (last,) = await client.dequeue("q")
    assert {parent.name: parent.result for parent in await client.parents(last)} == {"first": b"yes", "early": b""}
