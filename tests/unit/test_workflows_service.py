"""What the service of workflows does with large requests."""

from __future__ import annotations

from typing import Any, cast

import pytest

from router.codec.fields import FIELDS_MAX, bounded
from router.codec.status import InvalidRequest
from router.fleet.fleet import Fleet
from router.services.workflows import WorkflowsService
from shard.workflow import EDGES_MAX, NODES_MAX
from tests.unit.test_workflows_codec import node, request
from windrow.v1 import workflows_pb2 as pb

SERVICE = WorkflowsService(cast("Fleet", None))
OPTIONS: Any = cast("Any", SERVICE.StartWorkflow).options
# How many bytes of memory a decoded field may take (router/codec/fields.py), and for how many bytes of memory one
# reserved byte stands.
FIELD_BYTES, COPIES = 86, 4


class Asked(Exception):
    """The calculator was asked."""


class AskedCalculator:
    async def run(self, *_: Any) -> None:
        raise Asked


def edges(count: int) -> list[pb.WorkflowEdge]:
    return [pb.WorkflowEdge(node=f"{at}", on_failed=pb.FAILURE_POLICY_RUN) for at in range(count)]


@pytest.mark.parametrize(
    "of",
    [
        request(*(node(f"{at}") for at in range(201))),
        request(node("a"), pb.NewNode(name="b", after=edges(1001))),
        request(*(pb.NewNode(name=f"{at}", after=edges(11)) for at in range(100))),
    ],
    ids=["many nodes", "one node with many edges", "nodes that have many edges together"],
)
async def test_a_large_workflow_is_checked_in_a_thread_and_its_memory_is_reserved_meanwhile(
    monkeypatch: pytest.MonkeyPatch, of: pb.StartWorkflowRequest
) -> None:
    monkeypatch.setattr(SERVICE, "_calculator", AskedCalculator())
    with pytest.raises(Asked):
        await SERVICE.StartWorkflow(of)
    assert OPTIONS.answer_bytes(of) * COPIES >= OPTIONS.fields_max * FIELD_BYTES


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (request(*[pb.NewNode()] * (NODES_MAX + 1)), "nodes: must have at most 10,000 items, not 10,001"),
        (
            request(pb.NewNode(after=[pb.WorkflowEdge()] * (EDGES_MAX + 1))),
            "nodes: must wait for at most 100,000 others together, not 100,001",
        ),
    ],
    ids=["nodes", "edges"],
)
def test_too_many_nodes_or_edges_are_refused_before_the_request_waits_for_the_thread(
    of: pb.StartWorkflowRequest, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        OPTIONS.rules(of)


def test_the_largest_graph_that_the_contract_allows_is_decoded() -> None:
    per_node = EDGES_MAX // 10
    parents = [node(f"{at}") for at in range(NODES_MAX - 10)]
    for parent in parents:
        parent.job.template.payload = b"p"
        parent.job.template.priority = parent.job.template.max_attempts = 3
        parent.job.template.attributes["tenant"] = "a"
        parent.job.delay.seconds = 1
    children = [node(f"c{at}") for at in range(10)]
    for child in children:
        child.after.extend(edges(per_node))
    of = request(*parents, *children)
    assert sum(len(one.after) for one in of.nodes) == EDGES_MAX
    decode = bounded(pb.StartWorkflowRequest.FromString, of.DESCRIPTOR, fields_max=OPTIONS.fields_max)
    raw = of.SerializeToString()
    assert len(raw) > 2 * FIELDS_MAX
    assert decode(raw) == of
