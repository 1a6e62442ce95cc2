"""A workflow: a graph of jobs of one org. Pure: no I/O.

Functions in the shard's database decide what becomes of a workflow when a node ends
(shard/postgres/functions/fold_portion.sql).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, NewType
from uuid import UUID

from shard.vocabulary import JobId, Micros, NewJobs, OrgId

# A UUIDv7 as canonical lower-case text.
WorkflowId = NewType("WorkflowId", str)
NodeName = NewType("NodeName", str)

NODES_MAX = 10_000
EDGES_MAX = 100_000
# Upper bounds for the nodes and edges of one addition. An addition is stored under the workflow's lock. Calls that end
# other jobs of the workflow wait for that lock. Calls of other orgs that share a statement with such a call wait too
# (docs/decisions/0058-folds-in-portions.md).
ADDED_NODES_MAX = 1_000
ADDED_EDGES_MAX = 10_000
CALLBACKS_MAX = 10
# The most nodes of a chain in which each node waits for the previous node.
DEPTH_MAX = 1_000
# For how many days a shard keeps a workflow after its end. This time is longer than the horizon, within which a start
# may be repeated with the same id.
KEPT_DAYS = 30


class WorkflowState(enum.Enum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class NodeState(enum.Enum):
    """The state of a node, as callers see it."""

    BLOCKED = "blocked"
    RELEASED = "released"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


# Other states that a shard stores. In these states it is decided that the node's job is released or cancelled, but this
# is not done yet, because the job is locked or on another shard, or the workflow is paused.
STORED_AS = {"due": NodeState.BLOCKED, "doomed": NodeState.BLOCKED}


def node_state(stored: str) -> NodeState:
    return STORED_AS.get(stored) or NodeState(stored)


class OnFailed(enum.Enum):
    """What becomes of a node if another node, for which it waits, fails or is cancelled."""

    CANCEL = "cancel"
    IGNORE = "ignore"
    RUN = "run"


class Callback(enum.Enum):
    """When a callback runs: if the workflow has succeeded, if it has failed, or in any case."""

    SUCCESS = "success"
    FAILURE = "failure"
    END = "end"


class NodeOf(NamedTuple):
    """Which node of which workflow a job is, as the job stores it."""

    workflow: WorkflowId
    node: int

    @classmethod
    def parse(cls, stored: str) -> NodeOf:
        workflow, _, node = stored.partition("/")
        return cls(WorkflowId(workflow), int(node))

    def __str__(self) -> str:
        return f"{self.workflow}/{self.node}"


class Edge(NamedTuple):
    """`node` waits for `parent`, which has a smaller number."""

    node: int
    parent: int
    on_failed: OnFailed


class EndedNode(NamedTuple):
    """A node that has ended, and which a workflow takes over from the workflow that it retries."""

    number: int
    name: NodeName
    job_id: JobId
    # SUCCEEDED or SKIPPED.
    state: NodeState
    is_signal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWorkflow:
    """A workflow to be stored. `numbers`, `names` and `jobs` have an entry for each node that has not ended, in the
    order of the numbers. `job_id_of` makes the ids of the jobs."""

    id: WorkflowId
    name: str
    # A digest of the whole request.
    digest: bytes
    numbers: Sequence[int]
    names: Sequence[NodeName]
    jobs: NewJobs
    # In the order of their nodes.
    edges: Sequence[Edge]
    # The callbacks, by the number of their node.
    callbacks: Mapping[int, Callback]
    # The workflow that this workflow retries. None: this workflow is not a retry.
    retry_of: WorkflowId | None = None
    ended: Sequence[EndedNode] = ()
    # For each node that a job of the workflow has added, by the node's number: the number of that job's own node.
    # Includes nodes that have ended.
    added_by: Mapping[int, int] = field(default_factory=dict[int, int])
    # The numbers of the nodes in `numbers` that wait for signals.
    signals: Set[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNodes:
    """Nodes that a job of a workflow adds to it. `names` and `jobs` have an entry for each node. A new node comes after
    the new nodes for which it waits. The ids of the jobs are made when the numbers of the nodes are known.
    """

    workflow: WorkflowId
    names: Sequence[NodeName]
    jobs: NewJobs
    # The nodes for which a new node waits, by the position of the new node. Some of them may be in the workflow
    # already.
    after: Mapping[int, Sequence[tuple[NodeName, OnFailed]]]
    # What becomes of the job that adds the nodes if one of these nodes fails. None: that job does not wait for the
    # nodes.
    wait: OnFailed | None = None
    # The positions of the nodes that wait for signals.
    signals: Set[int] = frozenset()


class AddedNodes(NamedTuple):
    """The jobs of NewNodes, and how many of them this call stored. An earlier call has added the others."""

    jobs: Sequence[JobId]
    stored: int
    # Whether the job that adds the nodes must wait for them.
    waits: bool = False


class WorkflowRecord(NamedTuple):
    """A workflow as a shard has stored it, in the order of get_workflow.sql's columns."""

    id: WorkflowId
    org: OrgId
    name: str
    state: str
    created_at: Micros
    paused: bool
    ended_at: Micros | None
    nodes: int
    retry_of: WorkflowId | None


class NodeRecord(NamedTuple):
    """A node as a shard has stored it, in the order of list_nodes.sql's columns."""

    number: int
    name: NodeName
    job_id: JobId
    state: str
    callback: str | None
    ended_at: Micros | None
    # The names of the nodes for which the node waits, and its policy for each of them.
    after: Sequence[NodeName] | None
    policies: Sequence[str] | None
    # The earliest time at which the node's job may run, and the delay of the job after its release.
    run_at: Micros | None
    delay_us: int | None
    # The node whose job added this node. None: this node was stored with the workflow.
    added_by: int | None
    # Whether the node waits, or waited, for a signal.
    is_signal: bool


class SignalNode(NamedTuple):
    """A node that is to get a signal."""

    number: int
    job_id: JobId
    # True: the node has got its signal, and has ended.
    has_succeeded: bool


class ParentRecord(NamedTuple):
    """A node for which another node waited, in the order of list_parents.sql's columns."""

    number: int
    name: NodeName
    job_id: JobId
    state: str


class Fault(NamedTuple):
    """Something that is wrong with a workflow, in the order of check_workflows.sql's columns."""

    org: str
    workflow: WorkflowId
    # −1: the fault concerns the workflow as a whole.
    node: int
    what: str


def job_id_of(workflow: WorkflowId, node: int) -> JobId:
    """Returns the id of a node's job. This id has the same time as the workflow's id."""
    digest = int.from_bytes(hashlib.blake2b(f"{workflow}/{node}".encode(), digest_size=10).digest())
    made = UUID(workflow).int >> 80
    number = made << 80 | 0x7 << 76 | (digest >> 62 & 0xFFF) << 64 | 0b10 << 62 | digest & (1 << 62) - 1
    return JobId(str(UUID(int=number)))
