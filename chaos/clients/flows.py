"""The workflows that clients start, and the signals that clients give them. The nodes of these workflows run even if
their parents failed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import windrow
from proof.clients.site import QUEUE
from proof.history import asked_to_start, payload_of
from shard.workflow import WorkflowId, job_id_of

_NODES_MAX = 12
# The share of the nodes that wait for signals, and how long these nodes wait.
_SIGNALS = 0.2
_TIMEOUT_S = (1.0, 8.0)
# How many signals a node that waits gets. Each signal comes within one of these numbers of seconds after the start of
# the workflow was answered: early, around the end of the node's wait, or later.
_SIGNALS_EACH = (0, 1, 1, 2)
_GIVEN_S = (0.5, 5.0, 10.0)


class Signal(NamedTuple):
    """A signal that is to be given to a node of a workflow."""

    node: str
    payload: str
    after_s: float


def draw(org: str, luck: random.Random) -> tuple[windrow.Workflow, list[dict[str, object]]]:
    """Returns a workflow, and the form in which the history records the workflow."""
    flow = windrow.Workflow("chaos")
    asked: list[dict[str, object]] = []

    def next_job(after: Sequence[int], timeout_s: float | None = None) -> tuple[bytes, str]:
        """Returns the payload of the next job, and the job's id, which is also the name of its node."""
        job = job_id_of(WorkflowId(flow.id), len(asked))
        before = [str(asked[at]["job"]) for at in after]
        asked.append(asked_to_start(job=job, queue=QUEUE, workflow=flow.id, after=before, timeout_s=timeout_s))
        return payload_of(org, job, luck.randint(0, 500)), job

    for number in range(luck.randint(1, _NODES_MAX)):
        after = sorted(luck.sample(range(number), min(number, luck.randint(0, 3))))
        parents = [flow.nodes[at] for at in after]
        if luck.random() < _SIGNALS:
            timeout_s = round(luck.uniform(*_TIMEOUT_S), 3)
            payload, name = next_job(after, timeout_s)
            flow.signal(name, QUEUE, timeout=timeout_s, after=parents, on_failed=windrow.RUN_ANYWAY, payload=payload)
            continue
        payload, name = next_job(after)
        flow.job(QUEUE, "work", payload, name=name, after=parents, on_failed=windrow.RUN_ANYWAY)
    payload, name = next_job(range(len(flow.nodes)))
    flow.on_end(QUEUE, "work", payload, name=name)
    return flow, asked


def draw_signals(flow: windrow.Workflow, luck: random.Random) -> list[Signal]:
    """Returns the signals for the workflow's nodes. Some nodes get none, and some get two."""
    return [
        Signal(node.name, f"{node.name} {luck.randrange(1 << 32)}", luck.uniform(0.0, luck.choice(_GIVEN_S)))
        for node in flow.nodes
        if node.is_signal
        for _ in range(luck.choice(_SIGNALS_EACH))
    ]
