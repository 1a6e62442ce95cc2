"""The workflows that clients start. Their nodes run even if their parents failed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import windrow
from proof.clients.site import QUEUE
from proof.history import asked_to_start, payload_of
from shard.workflow import WorkflowId, job_id_of

_NODES_MAX = 12


def draw(org: str, luck: random.Random) -> tuple[windrow.Workflow, list[dict[str, object]]]:
    """Returns a workflow, and how the history records it."""
    flow = windrow.Workflow("chaos")
    asked: list[dict[str, object]] = []

    def next_job(after: Sequence[int]) -> tuple[bytes, str]:
        """Returns the payload of the next job, and the job's id, which is also the name of its node."""
        job = job_id_of(WorkflowId(flow.id), len(asked))
        before = [str(asked[at]["job"]) for at in after]
        asked.append(asked_to_start(job=job, queue=QUEUE, workflow=flow.id, after=before))
        return payload_of(org, job, luck.randint(0, 500)), job

    for number in range(luck.randint(1, _NODES_MAX)):
        after = sorted(luck.sample(range(number), min(number, luck.randint(0, 3))))
        parents = [flow.nodes[at] for at in after]
        payload, name = next_job(after)
        flow.job(QUEUE, "work", payload, name=name, after=parents, on_failed=windrow.RUN_ANYWAY)
    payload, name = next_job(range(len(flow.nodes)))
    flow.on_end(QUEUE, "work", payload, name=name)
    return flow, asked
