"""Makes the parameters of store_workflow.sql. This statement stores a new workflow, or adds nodes to a workflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shard.job_id import HORIZON_US, made_at_ms
from shard.postgres import arrays
from shard.queue.enqueue import SPARSE_ENCODERS
from shard.vocabulary import SPARSE_COLUMNS, QueueId, QueueName
from shard.workflow import NewWorkflow


class Growth(NamedTuple):
    """The workflow to which nodes are added."""

    flow: int
    is_paused: bool
    # The parent for which each new node waits first, by the number of the node. Nodes without parents have no entry.
    waits_on: Mapping[int, int]


def store_parameters(
    workflow: NewWorkflow, ids: Mapping[QueueName, QueueId], *, epoch: int, grows: Growth | None = None
) -> dict[str, object]:
    """Returns the parameters of store_workflow.sql. `grows`: the stored workflow to which these nodes are added. None:
    the workflow is new."""
    jobs = workflow.jobs
    count = len(jobs)
    positions = {number: at for at, number in enumerate(workflow.numbers)}
    # The edges are sorted by node and then by parent. So each node gets the last of its parents that has not ended.
    waits_on = {
        positions[edge.node]: edge.parent
        for edge in workflow.edges
        if edge.node in positions and edge.parent in positions
    }
    if grows is not None:
        waits_on = {positions[node]: parent for node, parent in grows.waits_on.items()}
    callbacks = {positions[number]: callback.value for number, callback in workflow.callbacks.items()}
    added_by = {positions[number]: adder for number, adder in workflow.added_by.items() if number in positions}
    ended_added_by = {
        at: workflow.added_by[node.number] for at, node in enumerate(workflow.ended) if node.number in workflow.added_by
    }
    signals = {at: 1 for number, at in positions.items() if number in workflow.signals}
    ended_signals = {at: 1 for at, node in enumerate(workflow.ended) if node.is_signal}
    plain = count + len(workflow.ended) - len(callbacks)
    # Nodes that were added have higher numbers than the callbacks.
    nodes = min(workflow.callbacks, default=plain)
    return {
        "made_ms": made_at_ms(workflow.id),
        "horizon_us": HORIZON_US,
        "org": jobs.org,
        "epoch": epoch,
        "id": workflow.id,
        "flow": None if grows is None else grows.flow,
        "is_paused": grows is not None and grows.is_paused,
        "name": workflow.name,
        "digest": workflow.digest,
        "nodes": nodes,
        "added": plain - nodes if grows is None else count,
        "open_node": max(positions.keys() - workflow.callbacks.keys()),
        "retry_of": workflow.retry_of,
        "ended_nodes": arrays.numbers(node.number for node in workflow.ended),
        "ended_names": arrays.texts([node.name for node in workflow.ended]),
        "ended_jobs": arrays.plain(node.job_id for node in workflow.ended),
        "ended_states": arrays.plain(node.state.value for node in workflow.ended),
        "ended_added_by": arrays.sparse_numbers(ended_added_by, len(workflow.ended)),
        "ended_signals": arrays.sparse_numbers(ended_signals, len(workflow.ended)),
        "numbers": arrays.numbers(workflow.numbers),
        "lane_ids": arrays.numbers(ids.values()),
        "lane_queues": arrays.names(ids),
        "names": arrays.texts(list(workflow.names)),
        "ids": arrays.plain(jobs.ids),
        "callbacks": arrays.sparse_texts(callbacks, count),
        "waits_on": arrays.sparse_numbers(waits_on, count),
        "added_by": arrays.sparse_numbers(added_by, count),
        "signals": arrays.sparse_numbers(signals, count),
        "queue_ids": arrays.numbers(ids[queue] for queue in jobs.queues),
        "kinds": arrays.names(jobs.kinds),
        "payloads": arrays.blobs(jobs.payloads),
        "edge_nodes": arrays.numbers(edge.node for edge in workflow.edges),
        "edge_parents": arrays.numbers(edge.parent for edge in workflow.edges),
        "edge_policies": arrays.names(edge.on_failed.value for edge in workflow.edges),
        **{name: SPARSE_ENCODERS[name](getattr(jobs, name), count) for name in SPARSE_COLUMNS},
    }
