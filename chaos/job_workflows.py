"""The operators of a run. They start workflows, give signals to them, and pause, resume, cancel and retry them.

Each call is repeated until it is answered, and each try is recorded: the checker must know which tries were not
answered, because routers may execute them later. Operators do not change the producers' workflows.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

import windrow
from chaos.clients import flows
from chaos.operator_calls import PAUSE_S, TRY_S, OperatorCalls
from proof.checker.evidence import Change, ChangeKind, OperatedFlow
from proof.clients import calls
from proof.clients.fates import pick_org
from proof.history import Outcome, Recorder, Verb
from windrow.v1 import workflows_pb2, workflows_pb2_grpc

_OPERATORS = 6
_CHANNELS = 3
# The longest time for which a workflow runs before an operator changes it, and how long a pause lasts.
_RUNS_S_MAX = 2.0
_PAUSED_S = (0.5, 5.0)
# For how long a retry is repeated. Routers refuse a retry while a job of the cancelled workflow is live.
_RETRY_S_MAX = 15.0
# How long it may take to end the last pauses, after all faults are healed.
_RESUME_S_MAX = 60.0

_Send = Callable[["workflows_pb2_grpc.WorkflowsAsyncStub"], Any]


class JobWorkflows:
    """All workflows that operators change."""

    def __init__(
        self,
        channels: Sequence[grpc.aio.Channel],
        orgs: Sequence[str],
        recorder: Recorder,
        *,
        seed: int,
        end_s: float,
    ) -> None:
        self._stubs = [workflows_pb2_grpc.WorkflowsStub(channel) for channel in channels]
        self._calls = calls.Calls(channels, recorder)
        self._orgs = list(orgs)
        self._recorder = recorder
        self._seed = seed
        self._end_s = end_s
        self._all: list[_Operated] = []

    async def run(self) -> None:
        """Starts and changes workflows until the time is over."""
        async with asyncio.TaskGroup() as group:
            for number in range(_OPERATORS):
                group.create_task(self._operate(group, random.Random(f"{self._seed}/workflows/{number}")))

    async def resume(self) -> None:
        """Ends all pauses that may be left. Called after all faults are healed."""
        async with asyncio.TaskGroup() as group:
            for one in self._all:
                group.create_task(one.resume_at_last())

    @property
    def seen(self) -> list[OperatedFlow]:
        return [one.seen for one in self._all]

    async def _operate(self, group: asyncio.TaskGroup, luck: random.Random) -> None:
        while time.time() < self._end_s:
            org = pick_org(luck, self._orgs)
            flow, asked = flows.draw(org, luck)
            one = _Operated(self._stubs, luck, org=org, flow=flow, end_s=self._end_s)
            self._all.append(one)
            if not await one.start(self._recorder, asked):
                return
            self._give_signals(group, org, flow.id, flow, luck)
            await asyncio.sleep(luck.uniform(0.0, _RUNS_S_MAX))
            if luck.random() < 0.5:
                await one.pause()
                await asyncio.sleep(luck.uniform(*_PAUSED_S))
                if luck.random() < 0.7:
                    await one.resume()
                    continue
            await one.cancel()
            if luck.random() < 0.7:
                await one.retry()
                if one.seen.retried:
                    self._give_signals(group, org, one.seen.retry, flow, luck)

    def _give_signals(
        self, group: asyncio.TaskGroup, org: str, workflow: str, flow: windrow.Workflow, luck: random.Random
    ) -> None:
        """Begins to give signals to the nodes of `flow` in this workflow, which is `flow` or a retry of it."""
        for signal in flows.draw_signals(flow, luck):
            group.create_task(self._signal(org, workflow, signal))

    async def _signal(self, org: str, workflow: str, signal: flows.Signal) -> None:
        await asyncio.sleep(signal.after_s)
        await self._calls.signal(org, workflow, signal.node, signal.payload)


@asynccontextmanager
async def open_workflows(
    address: str, orgs: Sequence[str], histories: Path, *, seed: int, seconds: float
) -> AsyncGenerator[JobWorkflows, None]:
    """Yields operators who work for this many seconds."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(calls.connect(address)) for _ in range(_CHANNELS)]
        recorder = stack.enter_context(Recorder(histories, "operator"))
        yield JobWorkflows(channels, orgs, recorder, seed=seed, end_s=time.time() + seconds)


class _Operated:
    """One workflow."""

    def __init__(
        self,
        stubs: Sequence[workflows_pb2_grpc.WorkflowsAsyncStub],
        luck: random.Random,
        *,
        org: str,
        flow: windrow.Workflow,
        end_s: float,
    ) -> None:
        self._calls = OperatorCalls(stubs, luck, end_s=end_s)
        self._org = org
        self._flow = flow
        self._end_s = end_s
        self._changes: list[Change] = []
        self._cancelling_s: float | None = None
        self._ended_as = ""
        self._retry: str = ""
        self._retried = False

    @property
    def seen(self) -> OperatedFlow:
        return OperatedFlow(
            workflow=self._flow.id,
            org=self._org,
            changes=self._changes,
            cancelling_s=self._cancelling_s,
            ended_as=self._ended_as,
            retry=self._retry,
            retried=self._retried,
        )

    async def start(self, recorder: Recorder, asked: list[dict[str, object]]) -> bool:
        """Starts the workflow. Returns whether a router answered in time."""
        request = self._flow.request(self._org)
        while time.time() < self._end_s:
            number = recorder.begin(Verb.START, self._org, asked)
            try:
                answer = await self._calls.stub().StartWorkflow(request, timeout=TRY_S)
            except grpc.aio.AioRpcError as error:
                recorder.end(number, Outcome.UNKNOWN, code=error.code().name)
                await asyncio.sleep(PAUSE_S)
                continue
            answered = [{"job": job, "duplicate": answer.duplicate} for job in answer.job_ids]
            recorder.end(number, Outcome.OK, answered=answered)
            return True
        return False

    async def pause(self) -> None:
        request = workflows_pb2.PauseWorkflowRequest(org=self._org, id=self._flow.id)
        await self._change(ChangeKind.PAUSE, lambda stub: stub.PauseWorkflow(request, timeout=TRY_S))

    async def resume(self, *, until_s: float | None = None) -> None:
        request = workflows_pb2.ResumeWorkflowRequest(org=self._org, id=self._flow.id)
        await self._change(ChangeKind.RESUME, lambda stub: stub.ResumeWorkflow(request, timeout=TRY_S), until_s=until_s)

    async def resume_at_last(self) -> None:
        if any(one.kind is ChangeKind.PAUSE for one in self._changes):
            await self.resume(until_s=time.time() + _RESUME_S_MAX)

    async def cancel(self) -> None:
        self._cancelling_s = time.monotonic()
        request = workflows_pb2.CancelWorkflowRequest(org=self._org, id=self._flow.id, reason="chaos")
        answer = await self._change(ChangeKind.CANCEL, lambda stub: stub.CancelWorkflow(request, timeout=TRY_S))
        if answer is not None:
            self._ended_as = (
                workflows_pb2.WorkflowState.Name(answer.workflow.state).removeprefix("WORKFLOW_STATE_").lower()
            )

    async def retry(self) -> None:
        """Retries the workflow if it has ended."""
        self._retry = windrow.uuid7()
        request = workflows_pb2.RetryWorkflowRequest(org=self._org, id=self._flow.id, new_id=self._retry)
        answer = await self._calls.until_answered(
            lambda stub: stub.RetryWorkflow(request, timeout=TRY_S),
            until_s=min(self._end_s, time.time() + _RETRY_S_MAX),
        )
        self._retried = answer is not None

    async def _change(self, kind: ChangeKind, send: _Send, *, until_s: float | None = None) -> Any:
        def record(began_us: int, ended_us: int | None, answer: Any) -> None:
            # Do not record a pause that had no effect because the workflow had ended.
            if answer is None or kind is not ChangeKind.PAUSE or answer.workflow.paused:
                self._changes.append(Change(kind=kind, began_us=began_us, ended_us=ended_us))

        return await self._calls.until_answered(send, record, until_s=until_s)
