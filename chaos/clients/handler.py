"""`python -m chaos.clients.handler`: runs windrow.Worker, as users do, for the orgs with most of the jobs.

A Worker does not tell its handlers whether their acks succeeded, so the recorded history has these acks without an
answer.
"""

from __future__ import annotations

import asyncio
import random

import windrow
from proof.clients import calls
from proof.clients.fates import NACK_DELAY_S_MAX, Fate, draw, draw_added, waits_for_added
from proof.clients.site import QUEUE, Orders, Site, main
from proof.history import Outcome, Recorder, Verb, asked_to_add, leased, payload_of

_ORGS = 10
_CONCURRENCY = 5
_WORK_S = 0.05


def _worker(
    client: windrow.Client, site: Site, orders: Orders, recorder: Recorder, luck: random.Random
) -> windrow.Worker:
    worker = windrow.Worker(
        client, QUEUE, concurrency=_CONCURRENCY, visibility_window=site.window_s, name=site.name, grace=2.0
    )
    org = client.org
    stream = recorder.begin(Verb.CONSUME, org, {"window_s": site.window_s})

    @worker.handler("work")
    async def work(job: windrow.Job) -> None:
        recorder.got(stream, [leased(lease=job.lease, attempt=job.attempt, payload=job.payload)])

        def about_to(verb: Verb, span_s: float = 0.0) -> None:
            recorder.begin(verb, org, {"leases": [job.lease.hex()], "span_s": span_s})

        fate = draw(luck, calm=orders.calm.is_set())
        try:
            if job.workflow is not None and not orders.calm.is_set():
                await _add(job, job.workflow, org, recorder, luck)
            match fate:
                case Fate.EXTEND | Fate.OVERSLEEP:
                    # Most of these jobs take longer than the window. The worker extends the lease meanwhile.
                    await asyncio.sleep(site.window_s * luck.uniform(0.9, 1.5))
                case Fate.ACK | Fate.RELEASE | Fate.FORGET:
                    await asyncio.sleep(luck.expovariate(1 / _WORK_S))
                case _:
                    pass
        except asyncio.CancelledError:
            # The worker stops, and releases the jobs that it interrupts.
            about_to(Verb.RELEASE)
            raise
        except windrow.WindrowError as error:
            # It is unknown whether the job waits for the nodes. If the job waits, this nack changes nothing.
            after_s = luck.uniform(0.0, NACK_DELAY_S_MAX)
            about_to(Verb.NACK, after_s)
            raise windrow.Retry("chaos", after=after_s) from error
        match fate:
            case Fate.NACK:
                after_s = luck.uniform(0.0, NACK_DELAY_S_MAX)
                about_to(Verb.NACK, after_s)
                raise windrow.Retry("chaos", after=after_s)
            case Fate.KILL:
                about_to(Verb.KILL)
                raise windrow.Kill("chaos")
            case _:
                pass
        about_to(Verb.ACK)

    return worker


async def _add(
    job: windrow.Job, workflow: windrow.WorkflowNode, org: str, recorder: Recorder, luck: random.Random
) -> None:
    """May add nodes to the job's workflow: chance decides whether. Raises Waiting if the job then waits for these
    nodes. Raises WindrowError if it is unknown whether the job waits."""
    node = str(leased(lease=job.lease, attempt=job.attempt, payload=job.payload)["job"])
    added = draw_added(node, luck)
    if not added:
        return
    nodes = windrow.Nodes()
    for name, after in added.items():
        nodes.job(QUEUE, "work", payload_of(org, name, 0), name=name, after=after, on_failed=windrow.RUN_ANYWAY)
    wait = waits_for_added(node)
    asked = asked_to_add(workflow=workflow.workflow_id, lease=job.lease, nodes=added, wait=wait)
    number = recorder.begin(Verb.ADD, org, asked)
    try:
        if wait:
            parents = await workflow.wait_for(nodes, on_failed=windrow.RUN_ANYWAY)
            answered: dict[str, object] = {"jobs": {parent.name: parent.job_id for parent in parents}}
        else:
            done = await workflow.add(nodes)
            answered = {"jobs": dict(done.job_ids), "stored": done.stored}
    except windrow.Waiting:
        recorder.end(number, Outcome.OK, answered={"waits": True})
        raise
    except windrow.WindrowError as error:
        # The call may have been tried several times, and a try before the last one may have been executed.
        recorder.end(number, Outcome.UNKNOWN, code=calls.error_code(error))
        if wait:
            raise
    else:
        recorder.end(number, Outcome.OK, answered=answered)


async def _work(site: Site, orders: Orders) -> None:
    made = windrow.Client(site.address, org=site.orgs[0], channels=2, create_spans=False)
    with site.recorder() as recorder:
        async with made as client, asyncio.TaskGroup() as group:
            workers = [
                _worker(client.for_org(org), site, orders, recorder, site.luck(org)) for org in site.orgs[:_ORGS]
            ]
            for worker in workers:
                group.create_task(worker.run())
            await orders.over.wait()
            for worker in workers:
                worker.stop()


if __name__ == "__main__":
    main(_work)
