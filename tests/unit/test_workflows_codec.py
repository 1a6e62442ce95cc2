"""Which new workflows are valid, and what the error says if a workflow is refused."""

from __future__ import annotations

import time

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from router.codec import workflows as codec
from router.codec.status import InvalidRequest
from shard.workflow import (
    ADDED_NODES_MAX,
    DEPTH_MAX,
    EDGES_MAX,
    NODES_MAX,
    Callback,
    Edge,
    NodeName,
    NodeOf,
    OnFailed,
    WorkflowId,
    job_id_of,
)
from windrow.v1 import job_pb2
from windrow.v1 import workflows_pb2 as pb

ID = "019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55"


def node(
    name: str, *after: str, callback: pb.Callback.ValueType = pb.CALLBACK_UNSPECIFIED, **job: object
) -> pb.NewNode:
    template = job_pb2.JobTemplate(queue="q", kind="k")
    return pb.NewNode(
        name=name,
        job=job_pb2.NewJob(template=template, **job),  # type: ignore[arg-type]
        after=[pb.WorkflowEdge(node=one) for one in after],
        callback=callback,
    )


def request(*nodes: pb.NewNode) -> pb.StartWorkflowRequest:
    return pb.StartWorkflowRequest(org="acme", id=ID, name="nightly", nodes=nodes)


def refusal(*nodes: pb.NewNode) -> tuple[str, str]:
    """Returns the field and the description of the first violation."""
    with pytest.raises(InvalidRequest) as refused:
        codec.new_workflow(request(*nodes), trace=None)
    first = refused.value.violations[0]
    return first.field, first.description


def test_a_cycle_is_told_with_its_path() -> None:
    field, words = refusal(node("a", "c"), node("b", "a"), node("c", "b"), node("d"))
    assert field.endswith(".after")
    path = words.removeprefix("waits for itself: ").split(" after ")
    assert path[0] == path[-1]
    assert sorted(path[1:]) == ["'a'", "'b'", "'c'"]
    waits = {"'a'": "'c'", "'b'": "'a'", "'c'": "'b'"}
    assert [waits[one] for one in path[:-1]] == path[1:]


def test_a_long_cycle_is_shortened() -> None:
    nodes = [node(f"n{at}", f"n{(at + 1) % 500}") for at in range(500)]
    _, words = refusal(*nodes)
    assert "…" in words
    assert len(words) < 300


@pytest.mark.parametrize(
    ("nodes", "field", "words"),
    [
        ([node("a", "a")], "nodes[0].after[0].node", "is the node itself: 'a'"),
        ([node("a", "z")], "nodes[0].after[0].node", "names no node of the workflow: 'z'"),
        ([node("a"), node("b", "a", "a")], "nodes[1].after[1].node", "is named twice: 'a'"),
        ([node("a"), node("a")], "nodes[1].name", "is that of nodes[0] too: 'a'"),
        ([node("a", callback=pb.CALLBACK_ON_END)], "nodes", "at least one that is not a callback"),
        ([node("a"), node("b", "a", callback=pb.CALLBACK_ON_END)], "nodes[1].after", "must be empty"),
        ([node("a", "b"), node("b", callback=pb.CALLBACK_ON_END)], "nodes[0].after[0].node", "is a callback"),
        (
            [node("a"), *(node(f"c{n}", callback=pb.CALLBACK_ON_END) for n in range(11))],
            "nodes",
            "at most 10 callbacks",
        ),
        ([node("a", id=ID)], "nodes[0].job.id", "must not be set"),
        ([node("a", dedup=job_pb2.Dedup(key="k"))], "nodes[0].job.dedup", "must not be set"),
        ([], "nodes", "must not be empty"),
    ],
)
def test_a_fault_is_told_with_its_place(nodes: list[pb.NewNode], field: str, words: str) -> None:
    at, told = refusal(*nodes)
    assert at == field
    assert words in told


def test_too_many_nodes_edges_and_links_are_refused() -> None:
    assert "at most 10,000 items" in refusal(*(node(f"n{at}") for at in range(NODES_MAX + 1)))[1]
    wide = [node(f"p{at}") for at in range(1000)]
    names = [one.name for one in wide]
    assert 100 * len(names) == EDGES_MAX
    edges = [*wide, *(node(f"c{at}", *names) for at in range(101))]
    assert "at most 100,000 others together" in refusal(*edges)[1]
    chain = [node("n0"), *(node(f"n{at}", f"n{at - 1}") for at in range(1, DEPTH_MAX + 1))]
    assert f"chain of more than {DEPTH_MAX:,} nodes" in refusal(*chain)[1]
    codec.new_workflow(request(*chain[:-1]), trace=None)


def test_nodes_are_numbered_after_those_that_they_wait_for() -> None:
    shuffled = request(
        node("over", callback=pb.CALLBACK_ON_FAILURE), node("d", "b", "c"), node("c", "a"), node("b", "a"), node("a")
    )
    flow, numbers = codec.new_workflow(shuffled, trace=None)
    assert (flow.names[0], flow.names[3], flow.names[4]) == ("a", "d", "over")
    assert all(edge.parent < edge.node for edge in flow.edges)
    assert len(flow.edges) == 4
    assert [flow.names[number] for number in numbers] == ["over", "d", "c", "b", "a"]
    assert flow.callbacks == {4: Callback.FAILURE}
    assert flow.jobs.ids == [job_id_of(WorkflowId(ID), number) for number in range(5)]


def test_an_order_that_is_right_stays() -> None:
    flow, _ = codec.new_workflow(request(node("x"), node("b", "x"), node("a", "x")), trace=None)
    assert flow.names == ["x", "b", "a"]
    assert flow.edges == [Edge(1, 0, OnFailed.CANCEL), Edge(2, 0, OnFailed.CANCEL)]


def test_the_ids_of_jobs_are_those_of_their_workflow() -> None:
    ids = [job_id_of(WorkflowId(ID), number) for number in range(100)]
    assert len(set(ids)) == 100
    assert all(one[:13] == ID[:13] and one[14] == "7" and one[19] in "89ab" for one in ids)
    of = NodeOf(WorkflowId(ID), 17)
    assert NodeOf.parse(str(of)) == of


def test_a_request_with_other_content_has_another_digest() -> None:
    one, _ = codec.new_workflow(request(node("a")), trace="x")
    same, _ = codec.new_workflow(request(node("a")), trace="y")
    changed = request(node("a"))
    changed.nodes[0].job.template.payload = b"other"
    assert one.digest == same.digest
    assert codec.new_workflow(changed, trace=None)[0].digest != one.digest


def added(*nodes: pb.NewNode) -> pb.AddNodesRequest:
    return pb.AddNodesRequest(org="acme", id=ID, lease=b"lease", nodes=nodes)


def test_added_nodes_come_after_those_of_them_that_they_wait_for() -> None:
    new, places = codec.new_nodes(added(node("a", "b", "there"), node("b"), node("c", "there")), trace=None)
    assert [new.names[place] for place in places] == ["a", "b", "c"]
    assert new.names.index(NodeName("b")) < new.names.index(NodeName("a"))
    assert {new.names[place]: [name for name, _ in after] for place, after in new.after.items()} == {
        "a": ["b", "there"],
        "c": ["there"],
    }


def test_faults_of_added_nodes_are_told_with_their_places() -> None:
    for nodes, field, words in (
        ([node("a"), node("a")], "nodes[1].name", "is that of nodes[0] too: 'a'"),
        ([node("a", "b"), node("b", "a")], "nodes[0].after", "waits for itself"),
        ([node("a", callback=pb.CALLBACK_ON_END)], "nodes[0].callback", "must not be set: callbacks start"),
        ([node("a", id=ID)], "nodes[0].job.id", "must not be set in a node of a workflow"),
        ([node(f"n{at}") for at in range(ADDED_NODES_MAX + 1)], "nodes", "must have at most 1,000 items"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            codec.new_nodes(added(*nodes), trace=None)
        first = refused.value.violations[0]
        assert first.field == field or (field == "nodes[0].after" and first.field.endswith(".after"))
        assert first.description.startswith(words)
    # All nodes that are added in one call may form one chain.
    chain = [node("n0", "there"), *(node(f"n{at}", f"n{at - 1}") for at in range(1, ADDED_NODES_MAX))]
    codec.new_nodes(added(*chain), trace=None)


def waiting(name: str, **fields: object) -> pb.NewNode:
    """Returns a node that waits for a signal."""
    made = node(name, **fields)  # type: ignore[arg-type]
    made.signal = True
    return made


def test_nodes_that_wait_for_signals_are_known_by_their_numbers() -> None:
    hour = Duration(seconds=3600)
    last, first = node("last", "s"), waiting("s", delay=hour)
    flow, numbers = codec.new_workflow(request(last, first), trace=None)
    assert flow.signals == {numbers[1]} == {0}
    assert flow.jobs.delay_us == {0: 3_600_000_000}
    assert flow.jobs.priorities == {0: 1}
    first.job.template.priority = 7
    more, places = codec.new_nodes(added(last, first), trace=None)
    assert more.signals == {places[1]} == {0}
    assert more.jobs.priorities == {0: 7}
    plain, _ = codec.new_workflow(request(last, node("s", delay=hour)), trace=None)
    assert plain.signals == set()
    assert plain.digest != flow.digest


@pytest.mark.parametrize("add", [False, True])
def test_a_node_that_waits_for_a_signal_has_a_time_limit_and_nothing_that_only_a_job_that_runs_needs(
    add: bool,
) -> None:
    hour, late = Duration(seconds=3600), Timestamp(seconds=round(time.time()) + 7200)
    grouped = waiting("s", delay=hour)
    grouped.job.template.group = "g"
    faults = [
        (waiting("s"), "nodes[1].job.delay", "must be set"),
        (waiting("s", run_at=Timestamp(seconds=1)), "nodes[1].job.delay", "must be set"),
        (waiting("s", delay=hour, expires_at=late), "nodes[1].job.expires_at", "must not be set"),
        (grouped, "nodes[1].job.template.group", "must not be set"),
    ]
    if not add:
        callback = waiting("s", delay=hour, callback=pb.CALLBACK_ON_END)
        faults.append((callback, "nodes[1].signal", "must not be set: the node is a callback"))

    def check(fault: pb.NewNode) -> None:
        if add:
            codec.new_nodes(added(node("a"), fault), trace=None)
        else:
            codec.new_workflow(request(node("a"), fault), trace=None)

    for fault, field, words in faults:
        with pytest.raises(InvalidRequest) as refused:
            check(fault)
        first = refused.value.violations[0]
        assert first.field == field
        assert first.description.startswith(words)
