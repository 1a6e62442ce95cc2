"""Retries of workflows, through a router: what runs again, what is taken over, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

import pytest

import windrow
from shard.history import days
from shard.postgres.pool import Database
from shard.vocabulary import OrgId
from tests.conftest import SHARD
from tests.integration.test_workflows_calls import until_ended
from tests.routers import Routers, running_routers, write_cluster
from tests.timemachine import age_finished
from windrow.ids import uuid7


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
    """Works jobs off until none is ready: acks them with their payload as the result, and kills some."""
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
    """A diamond that has failed, with its callbacks done."""
    started = await client.start(diamond())
    await work(client, dies)
    record, _ = await client.get_workflow(started.id)
    assert record.state is windrow.WorkflowState.FAILED
    return started


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_workflow_that_runs_or_has_succeeded_is_refused(client: windrow.Client) -> None:
    started = await client.start(diamond())
    with pytest.raises(windrow.FailedPrecondition, match="cannot be retried: it runs"):
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
    # The old one stays as it ended, and leaves no dead job behind.
    assert (await client.get_workflow(started.id))[0].state is windrow.WorkflowState.FAILED
    (old,) = (await client.get_jobs([started.job_ids["b"]])).values()
    assert (old.state, old.reason) == (windrow.JobState.CANCELLED, f"retried by workflow {retry.id}")
    assert [one.id for one in await client.list_workflows()] == [retry.id, started.id]


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
    # Their ids change with their age.
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
