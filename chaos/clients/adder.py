"""Adds nodes to the workflows of jobs that a worker has. Some of the jobs then wait for these nodes."""

from __future__ import annotations

import asyncio
import random

from proof.clients import calls
from proof.clients.fates import draw_added, waits_for_added
from proof.clients.site import Orders, Site
from proof.history import leased
from windrow.v1 import job_pb2

_CALLS_MAX = 3
# Some calls get such a short timeout that their answers are lost, although routers may execute the calls.
_HASTY_S = 0.05
# The share of the calls that are made late, and after how many visibility windows these calls are made. The lease may
# have ended by then.
_LATE = 0.2
_LATE_WINDOWS = (0.5, 2.0)


class Adder:
    """Adds nodes for one worker process."""

    def __init__(self, site: Site, orders: Orders, made: calls.Calls, group: asyncio.TaskGroup) -> None:
        self._site = site
        self._orders = orders
        self._calls = made
        self._group = group

    async def add(self, org: str, job: job_pb2.LeasedJob, luck: random.Random) -> bool:
        """If the job is in a workflow, may add nodes to the workflow: chance decides whether, and which nodes. Returns
        True if the caller must not use the lease any more."""
        if self._orders.calm.is_set() or not job.HasField("workflow"):
            return False
        node = str(leased(lease=job.lease, attempt=job.attempt, payload=job.payload)["job"])
        if luck.random() < _LATE:
            after_s = self._site.window_s * luck.uniform(*_LATE_WINDOWS)
            self._group.create_task(self._add_late(org, job, node, draw_added(node, luck), after_s))
            return True
        # Make several calls. Each call may name other nodes than the call before.
        for left in reversed(range(luck.randint(1, _CALLS_MAX))):
            nodes = draw_added(node, luck)
            if not nodes:
                return False
            wait = not left and waits_for_added(node)
            try_s = luck.choice((calls.TRY_S, calls.TRY_S, luck.uniform(0.0, _HASTY_S)))
            match await self._calls.add_nodes(org, job, nodes, wait=wait, try_s=try_s):
                case calls.Added.WAITS:
                    return True
                case calls.Added.UNKNOWN:
                    # The lease may have ended.
                    if wait:
                        return True
                case calls.Added.REFUSED:
                    return False
                case calls.Added.GOES_ON:
                    pass
        return False

    async def _add_late(
        self, org: str, job: job_pb2.LeasedJob, node: str, nodes: dict[str, list[str]], after_s: float
    ) -> None:
        await self._orders.pause(after_s)
        if nodes and not self._orders.calm.is_set():
            await self._calls.add_nodes(org, job, nodes, wait=waits_for_added(node))
