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
# Upper bounds for the nodes and edges of one addition. An addition is stored under the workflow's lock. Calls that
# end other jobs of the workflow wait for that lock, and so do calls of other orgs that share a statement with such a
# call (docs/decisions/0058-folds-in-portions.md).
ADDED_NODES_MAX = 1_000
ADDED_EDGES_MAX = 10_000
CALLBACKS_MAX = 10
# The most nodes of a chain in which each node waits for the one before it.
DEPTH_MAX = 1_000
# For how many days a workflow is known after its end. A start may be repeated with the same id only within the
# horizon, which is shorter.
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


# Further states that a shard stores. What becomes of the node is decided, but not done yet, because its job is locked
# or on another shard, or its workflow is paused.
STORED_AS = {"due": NodeState.BLOCKED, "doomed": NodeState.BLOCKED}


def node_state(stored: str) -> NodeState:
    return STORED_AS.get(stored) or NodeState(stored)


class OnFailed(enum.Enum):
    """What becomes of a node if a node that it waits for fails or is cancelled."""

    CANCEL = "cancel"
    IGNORE = "ignore"
    RUN = "run"


class Callback(enum.Enum):
    """When a callback runs: if the workflow has succeeded, if it has failed, or in any case."""

    SUCCESS = "success"
    FAILURE = "failure"
    END = "end"


class NodeOf(NamedTuple):
    """What a job knows of its workflow."""

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
    """A node that a workflow takes over from the workflow that it retries."""

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
    # The workflow that this one retries. None: it is no retry.
    retry_of: WorkflowId | None = None
    ended: Sequence[EndedNode] = ()
    # For each node that a job has added, by the node's number: the number of that job's node. Nodes that have ended are
    # included.
    added_by: Mapping[int, int] = field(default_factory=dict[int, int])
    # The numbers of the nodes in `numbers` that wait for signals.
    signals: Set[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNodes:
    """Nodes that a job of a workflow adds to it. `names` and `jobs` have an entry for each node. A new node
    stands after the new nodes that it waits for. The ids of the jobs are made when the numbers of the nodes are known.
    """

    workflow: WorkflowId
    names: Sequence[NodeName]
    jobs: NewJobs
    # The nodes that a new node waits for, by the position of the new node. Some of them may be in the workflow already.
    after: Mapping[int, Sequence[tuple[NodeName, OnFailed]]]
    # What becomes of the job if one of these nodes fails. None: the job does not wait for them.
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
    """A workflow as a shard has it, in the order of get_workflow.sql's columns."""

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
    """A node as a shard has it, in the order of list_nodes.sql's columns."""

    number: int
    name: NodeName
    job_id: JobId
    state: str
    callback: str | None
    ended_at: Micros | None
    # The names of the nodes that it waits for, and its policy for each of them.
    after: Sequence[NodeName] | None
    policies: Sequence[str] | None
    # The earliest time at which its job may run, and the delay of the job after its release.
    run_at: Micros | None
    delay_us: int | None
    # The node whose job added it. None: it was stored with the workflow.
    added_by: int | None
    # Whether it waits, or waited, for a signal.
    is_signal: bool


class SignalNode(NamedTuple):
    """A node that is to get a signal."""

    number: int
    job_id: JobId
    # True: it had its signal, and has ended.
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
    # −1: it concerns the workflow as a whole.
    node: int
    what: str


def job_id_of(workflow: WorkflowId, node: int) -> JobId:
    """Returns the id of a node's job. The time in it is the time in the workflow's id."""
    digest = int.from_bytes(hashlib.blake2b(f"{workflow}/{node}".encode(), digest_size=10).digest())
    made = UUID(workflow).int >> 80
    number = made << 80 | 0x7 << 76 | (digest >> 62 & 0xFFF) << 64 | 0b10 << 62 | digest & (1 << 62) - 1
    return JobId(str(UUID(int=number)))
