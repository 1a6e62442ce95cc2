"""Continues folds that have not done all their work, for the workflows of one shard, and forgets old workflows.

The transaction that ends a job also folds that end (shard/postgres/functions/fold_at_commit.sql), but releases and
cancels at most one portion of jobs (fold_portion.sql). If work remains, the transaction notifies the routers. Sweeps
find the work about which there was no notification: jobs that were locked when they were to be released, and work that
remained after a move or after a process was killed (invariant I7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from enum import Enum, auto

from shard.postgres import partitions
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.workflow import KEPT_DAYS, WorkflowId
from shard.workflows import statements

# How many workflows of each kind one sweep visits: workflows with ends that no fold has processed, and workflows with
# jobs that wait to be released or cancelled.
_ROWS = 1_000
# How many workflows a statement deletes. A workflow may have 110,000 rows, and a statement that deletes many workflows
# would exceed its time limit each time.
_FORGOTTEN_AT_ONCE = 10
# While other sessions hold the lock of a workflow, its fold is tried again after this pause, up to _BUSY_MAX times.
# After that, only the next sweep continues the fold.
_BUSY_PAUSE_S = 0.010
_BUSY_MAX = 100
# Upper bound for the workflows that wait for `go_on`. If there are more workflows, only sweeps continue the folds of
# the others.
_LEFT_MAX = 10_000

# The number of an org on this shard, and the id of a workflow.
Left = tuple[int, WorkflowId]
# The positions before all workflows.
_FIRST_ARRIVED: Left = (0, WorkflowId("00000000-0000-0000-0000-000000000000"))
_FIRST_FLOW = 0


class _Fold(Enum):
    """The result of folding a portion: no work remains, work remains, or another session holds the workflow's lock."""

    DONE = auto()
    LEFT = auto()
    BUSY = auto()


class WorkflowSweep:
    """Continues the folds of one shard. All methods may raise ShardUnavailable."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store
        # The workflows after which the next sweep begins.
        self._after_arrived = _FIRST_ARRIVED
        self._after_flow = _FIRST_FLOW
        self._left: dict[Left, None] = {}
        self._has_left = asyncio.Event()

    def left(self, workflows: Collection[Left]) -> None:
        """Notes that folds of these workflows have not done all work. `go_on` then continues these folds."""
        if len(self._left) + len(workflows) <= _LEFT_MAX:
            self._left |= dict.fromkeys(workflows)
            self._has_left.set()

    async def go_on(self) -> None:
        """Waits until `left` is called, and continues the folds of the workflows that `left` noted. After an error, a
        sweep continues these folds."""
        await self._has_left.wait()
        await self._finish([])

    async def sweep(self) -> None:
        """Finds workflows whose folds have not done all work, and continues these folds. If there are more workflows
        than one sweep may visit, the next sweep begins after the last workflow that was visited."""
        after_org, after_workflow = self._after_arrived
        parameters = {
            "after_org": after_org,
            "after_workflow": after_workflow,
            "after_flow": self._after_flow,
            "rows": _ROWS,
        }
        found = await self._database.run(statements.FIND_UNFOLDED, parameters)
        self._after_arrived, self._after_flow = _FIRST_ARRIVED, _FIRST_FLOW
        for place, flow, org_id, id_, _ in found:
            if place == _ROWS and flow is None:
                self._after_arrived = org_id, WorkflowId(id_)
            elif place == _ROWS:
                self._after_flow = flow
        await self._finish([(org_id, WorkflowId(id_)) for *_, org_id, id_, is_unfolded in found if is_unfolded])

    async def finish(self, org_id: int, workflow: WorkflowId) -> None:
        """Continues the fold of a workflow, until all work is done."""
        await self._finish([(org_id, workflow)])

    async def forget(self) -> None:
        """Forgets the workflows that ended long ago."""
        parameters = {"days": KEPT_DAYS, "rows": _FORGOTTEN_AT_ONCE}
        while (await self._database.run(statements.FORGET_WORKFLOWS, parameters))[0][0] == _FORGOTTEN_AT_ONCE:
            pass

    async def _finish(self, workflows: Sequence[Left]) -> None:
        """Continues the folds of these workflows, and of the workflows that `left` has noted. Folds a portion of each
        workflow in turn, until all work is done, or until _BUSY_MAX tries in a row found only locked workflows."""
        busy = 0
        while True:
            workflows = [*dict.fromkeys([*workflows, *self._left])]
            self._left.clear()
            self._has_left.clear()
            outcomes = [await self._fold(one) for one in workflows]
            workflows = [one for one, outcome in zip(workflows, outcomes, strict=True) if outcome is not _Fold.DONE]
            busy = 0 if _Fold.LEFT in outcomes else busy + 1
            if not workflows or busy == _BUSY_MAX:
                return
            if busy:
                await asyncio.sleep(_BUSY_PAUSE_S)

    async def _fold(self, workflow: Left) -> _Fold:
        org_id, id_ = workflow
        parameters = {"org_id": org_id, "id": id_}
        ((released, is_left),) = await partitions.finish(self._database, statements.FOLD_MORE, parameters)
        if released is None:
            return _Fold.BUSY
        if released:
            self._store.jobs_stored(set(released))
        return _Fold.LEFT if is_left else _Fold.DONE
