"""How `windrow workflows show` draws a workflow for other programs."""

from __future__ import annotations

from cli.workflows import _drawn, _mermaid
from windrow.v1 import workflows_pb2


def test_the_name_of_a_node_is_only_text_in_mermaid() -> None:
    name = '"]; click n0 "javascript:x" <img src=x onerror=x> #lt;'
    (_, node) = _mermaid([workflows_pb2.NodeInfo(name=name, number=0)])
    label = node.removeprefix('    n0["').removesuffix('"]')
    assert label.partition("<br/>")[0] == ("#34;]; click n0 #34;javascript:x#34; #60;img src=x onerror=x#62; #35;lt;")


def test_a_node_is_drawn_below_the_nodes_that_its_own_job_has_added() -> None:
    edge = workflows_pb2.WorkflowEdge
    waits = workflows_pb2.NodeInfo(name="waits", number=0, after=[edge(node="added")])
    last = workflows_pb2.NodeInfo(name="last", number=1, after=[edge(node="waits")])
    added = workflows_pb2.NodeInfo(name="added", number=2)
    assert [row[0] for row in _drawn([waits, last, added])] == ["added", "  └ waits", "    └ last"]
