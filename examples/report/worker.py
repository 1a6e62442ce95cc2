"""Runs the nodes of report workflows. Any number of workers may run, and no worker has to keep running between two
nodes.

python -m examples.report.worker acme
"""

from __future__ import annotations

import argparse
import json
import logging
import time

import windrow
from examples.pushes.totals import Push
from examples.report.flow import QUEUE, plain

_log = logging.getLogger("report")


def make_worker(org: str, *, window_s: float, slow_s: float) -> windrow.Worker:
    client = windrow.Client(org=org)
    worker = windrow.Worker(client, QUEUE, visibility_window=window_s)

    @worker.handler("count")
    def count(job: windrow.Job) -> list[int]:
        """Counts the pushes of one part."""
        time.sleep(slow_s)
        try:
            pushes = [Push.from_json(line) for line in job.payload.splitlines()]
        except (ValueError, TypeError) as error:
            # Do not try again: the part will never be readable. Windrow cancels the nodes that wait for this one, and
            # releases the node that raises the alarm.
            raise windrow.Kill(f"this part cannot be read: {error}") from error
        (figures,) = plain(pushes).values()
        return figures

    @worker.handler("add")
    async def add(job: windrow.Job) -> list[int]:
        """Adds up the parts of one project."""
        parts = [json.loads(parent.result) for parent in await client.parents(job)]
        return [sum(column) for column in zip(*parts, strict=True)]

    @worker.handler("write_report")
    async def write_report(job: windrow.Job) -> dict[str, list[int]]:
        """Puts the sums of all projects together. The name of each parent says to which project its sums belong."""
        return {parent.name: json.loads(parent.result) for parent in await client.parents(job)}

    @worker.handler("raise_alarm")
    async def raise_alarm(job: windrow.Job) -> None:
        assert job.workflow is not None
        failed = [
            node.name
            for node in await client.list_nodes(job.workflow.workflow_id)
            if node.state is windrow.NodeState.FAILED
        ]
        _log.error("report %s has failed at: %s", job.workflow.workflow_id, ", ".join(failed))

    return worker


def main() -> None:
    parser = argparse.ArgumentParser(description="Works the nodes of reports.")
    parser.add_argument("org")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="the visibility window; default: 30")
    parser.add_argument(
        "--slow", type=float, default=0.0, metavar="S", help="how much longer a part takes, to watch it"
    )
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    windrow.run(make_worker(given.org, window_s=given.window, slow_s=given.slow))


if __name__ == "__main__":
    main()
