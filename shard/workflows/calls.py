"""Code that all calls about the workflows of one shard share: it lets the orgs take turns, finds the queues of new
jobs, and makes changes under the lock of a workflow.

A change locks the workflow first, in a statement of its own, so that the statements after it see what all earlier folds
have done (docs/decisions/0054-ends-of-nodes-are-appended-and-folded.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import psycopg

from shard.errors import ShardUnavailable, TooManyQueues, UnknownWorkflow
from shard.placement import statements as placement_statements
from shard.postgres import arrays, partitions
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.queue.coalescer import SingleCall, single_calls
from shard.queue.enqueue import find_refused
from shard.queue.queue_ids import QUEUES_MAX
from shard.queue.store import Store
from shard.vocabulary import Micros, OrgId, QueueId, QueueName
from shard.workflow import WorkflowId, WorkflowState
from shard.workflows import statements

_T = TypeVar("_T")


class LockedWorkflow(NamedTuple):
    """A workflow whose lock this transaction holds."""

    connection: Connection
    flow: int
    org_id: int
    state: WorkflowState


class WorkflowCalls:
    """Runs the calls about the workflows of one shard. All methods may raise ShardUnavailable. Methods that wait for
    the org's turn may also raise TooManyWaiting."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store
        # Serves the orgs in turn (invariant I4). At most three acts run at the same time, including the extra act of
        # the coalescer. Each act uses one connection at a time.
        self._calls = single_calls(
            lambda: ShardUnavailable(database.name, "earlier calls about workflows take long"), acts_max=2
        )

    async def in_turn(self, org: OrgId, act: Callable[[], Awaitable[_T]]) -> _T:
        """Runs `act` when it is the org's turn. Nothing in `act` may wait for another turn."""
        answer: _T = await self._calls.submit(SingleCall(org, 1, act))
        return answer

    async def read(self, org: OrgId, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
        """Runs a statement when it is the org's turn."""
        return await self.in_turn(org, partial(self._database.run, statement, parameters))

    async def change(
        self, org: OrgId, workflow: WorkflowId, act: Callable[[LockedWorkflow], Awaitable[_T]], *, epoch: int
    ) -> _T:
        """Runs `act` under the workflow's lock, when it is the org's turn, and folds a portion of the workflow in the
        same transaction. May run `act` twice. Raises UnknownWorkflow, NotOwned, ClockSetBack."""

        async def change() -> tuple[_T, set[QueueId]]:
            async with self._locked(org, workflow, epoch=epoch) as locked:
                answer = await act(locked)
                parameters = {"org_ids": arrays.numbers([locked.org_id]), "ids": arrays.plain([workflow])}
                ((released,),) = await locked.connection.run(placement_statements.FOLD_WORKFLOWS, parameters)
            return answer, set(released)

        answer, released = await self.in_turn(org, partial(self._with_partitions, change))
        if released:
            self._store.jobs_stored(released)
        return answer

    async def _with_partitions(self, change: Callable[[], Awaitable[_T]]) -> _T:
        try:
            return await change()
        except psycopg.errors.CheckViolation as error:
            # An error without the name of a constraint says that a partition is missing. Create it, as
            # partitions.finish does.
            if error.diag.constraint_name is not None:
                raise
            await partitions.make_ahead(self._database)
            return await change()

    @contextlib.asynccontextmanager
    async def _locked(self, org: OrgId, workflow: WorkflowId, *, epoch: int) -> AsyncGenerator[LockedWorkflow, None]:
        self._store.clock.check()
        parameters = {"org": org, "id": workflow, "epoch": epoch}
        async with self._database.transaction() as connection:
            await connection.run(statements.BEGIN_CHANGE, parameters)
            rows = await connection.run(statements.FIND_FLOW, parameters)
            if rows:
                ((flow, org_id, state),) = rows
                yield LockedWorkflow(connection, flow, org_id, WorkflowState(state))
                return
        # Ask about the slot only after the transaction has ended. If several acts held a connection and needed a second
        # connection, they could wait for each other.
        await self.refuse_unowned(org, epoch)
        raise UnknownWorkflow(org, workflow)

    async def refuse_unowned(self, org: OrgId, epoch: int) -> None:
        """Raises NotOwned if the shard does not own the org's slot with this epoch."""
        for error in (await find_refused(self._database, [(org, epoch)])).values():
            raise error

    async def queue_ids(
        self, org: OrgId, queues: Sequence[QueueName], *, check: Callable[[Micros], Awaitable[None]] | None = None
    ) -> dict[QueueName, QueueId]:
        """Returns the ids of the queues, and makes the queues that do not exist. `check` has the same meaning as for
        QueueIds.make. Raises TooManyQueues."""
        numbers = await self._store.names.make([(org, queue) for queue in queues], check=check)
        if len(numbers) < len(queues):
            missing = [queue for queue in queues if (org, queue) not in numbers]
            raise TooManyQueues(self._database.name, org, missing, queues_max=QUEUES_MAX)
        return {queue: numbers[org, queue] for queue in queues}
