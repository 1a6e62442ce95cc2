"""Long calculations run in one thread, one at a time, and orgs take turns."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any, cast

import pytest

from router.calculator import Calculator
from router.codec import workflows as codec
from router.fleet.fleet import Fleet
from router.route import retry_workflow
from router.route.retry_workflow import retry_of
from router.services.workflows import WorkflowsService
from shard.job_record import JobRecord
from shard.vocabulary import JobId, JobState, Micros, OrgId
from shard.workflow import NodeName, NodeRecord, NodeState, WorkflowId, WorkflowRecord, WorkflowState
from shard.workflows.workflow_admin import WorkflowAdmin
from tests.routers import PATIENCE_S
from windrow.ids import uuid7
from windrow.v1 import job_pb2, workflows_pb2

BUSY, OTHER = OrgId("busy"), OrgId("other")


class Begun:
    """Calculations. Each one continues until the test lets it end."""

    def __init__(self) -> None:
        self.orgs: list[str] = []
        self.first = threading.Event()
        self.threads: set[int] = set()
        self._go_on = threading.Semaphore(0)
        self._running = 0

    def calculate(self, org: str) -> str:
        self._running += 1
        assert self._running == 1
        self.orgs.append(org)
        self.first.set()
        self.threads.add(threading.get_ident())
        assert self._go_on.acquire(timeout=PATIENCE_S)
        self._running -= 1
        return org

    def let_end(self, count: int) -> None:
        for _ in range(count):
            self._go_on.release()


async def test_orgs_take_turns_in_one_thread() -> None:
    calculator, begun = Calculator("tests"), Begun()
    busy = [asyncio.ensure_future(calculator.run(BUSY, partial(begun.calculate, BUSY))) for _ in range(10)]
    other = asyncio.ensure_future(calculator.run(OTHER, partial(begun.calculate, OTHER)))
    await asyncio.sleep(0)
    begun.let_end(11)
    assert await asyncio.gather(*busy, other) == [BUSY] * 10 + [OTHER]
    # The other org's calculation ran first or second, although all ten calculations of the busy org had come before it.
    assert begun.orgs.index(OTHER) <= 1
    assert len(begun.threads) == 1
    assert threading.get_ident() not in begun.threads


async def test_a_calculation_whose_caller_has_left_keeps_the_thread_until_it_has_ended() -> None:
    calculator, begun = Calculator("tests"), Begun()
    left = asyncio.ensure_future(calculator.run(BUSY, partial(begun.calculate, BUSY)))
    assert await asyncio.to_thread(begun.first.wait, PATIENCE_S)
    left.cancel()
    await asyncio.wait({left})
    other = asyncio.ensure_future(calculator.run(OTHER, partial(begun.calculate, OTHER)))
    begun.let_end(2)
    assert await other == OTHER


async def test_an_error_of_a_calculation_reaches_its_caller() -> None:
    calculator = Calculator("tests")
    with pytest.raises(ZeroDivisionError):
        await calculator.run(BUSY, lambda: 1 // 0)


async def test_large_workflows_are_decoded_one_after_another_and_orgs_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = Begun()

    def new_workflow(request: workflows_pb2.StartWorkflowRequest, **_: object) -> Any:
        begun.calculate(request.org)
        raise ZeroDivisionError

    monkeypatch.setattr(codec, "new_workflow", new_workflow)
    service = WorkflowsService(cast("Fleet", None))
    nodes = [workflows_pb2.NewNode(name=str(at), job=job_pb2.NewJob()) for at in range(201)]
    requests = [workflows_pb2.StartWorkflowRequest(org=org, nodes=nodes) for org in [BUSY] * 5 + [OTHER]]
    calls = [asyncio.ensure_future(service.StartWorkflow(request)) for request in requests]
    await asyncio.sleep(0)
    begun.let_end(6)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    # Begun.calculate checks that there is never more than one calculation at a time.
    assert {type(answer) for answer in answers} == {ZeroDivisionError}
    assert begun.orgs.index(OTHER) <= 1


class Workflows:
    """A failed workflow with one node, whose job is dead. `known`: the ids of stored workflows."""

    def __init__(self, old: WorkflowId, job: JobId) -> None:
        self.known: set[WorkflowId] = set()
        self._record = WorkflowRecord(old, BUSY, "", WorkflowState.FAILED.value, Micros(1), False, Micros(2), 1, None)
        self._node = NodeRecord(
            0, NodeName("a"), job, NodeState.FAILED.value, None, Micros(2), None, None, None, None, None, False
        )

    async def get(self, *_: object) -> WorkflowRecord:
        return self._record

    async def nodes(self, *_: object, **__: object) -> tuple[list[NodeRecord], str]:
        return [self._node], ""

    async def is_known(self, _org: OrgId, workflow: WorkflowId, _digest: bytes) -> bool:
        return workflow in self.known


def dead_job(job: JobId) -> JobRecord:
    known: dict[str, object] = {"id": job, "queue": "q", "state": JobState.DEAD.value, "priority": 5, "kind": "k"}
    known |= {"payload": b"", "whole": True}
    return JobRecord._make(known.get(name) for name in JobRecord._fields)


async def test_a_retry_that_is_stored_already_is_not_made_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, job = WorkflowId(uuid7()), WorkflowId(uuid7()), JobId(uuid7())
    workflows = Workflows(old, job)
    threads: set[int] = set()
    make = retry_workflow._workflow

    def noted(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return make(*arguments)

    async def look_up(*_: object) -> dict[JobId, JobRecord]:
        return {job: dead_job(job)}

    monkeypatch.setattr(retry_workflow, "look_up", look_up)
    monkeypatch.setattr(retry_workflow, "_workflow", noted)
    calculator = Calculator("tests")

    async def retried() -> retry_workflow.Retry:
        admin = cast("WorkflowAdmin", workflows)
        return await retry_of(
            cast("Fleet", None), admin, BUSY, old, new, trace=None, calculator=calculator, bytes_max=1000
        )

    made = await retried()
    assert made.workflow is not None
    assert made.workflow.names == ["a"]
    # The thread of the event loop does not make the new workflow, because the workflow may have 100,000 edges.
    assert threads
    assert threading.get_ident() not in threads
    threads.clear()
    workflows.known.add(new)
    again = await retried()
    assert again.workflow is None
    assert again.dead == made.dead == [job]
    assert not threads
