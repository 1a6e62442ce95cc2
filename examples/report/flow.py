"""Starts the report as a workflow, waits for it, and compares it with a plain computation.

python -m examples.report.flow acme --pushes 5000
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence

import windrow
from examples.pushes.totals import Push, read_pushes

QUEUE = "report"
# How many pushes one node counts. The payload of a node may have up to 1 MiB. All payloads of the workflow together may
# have up to 16 MiB.
PART = 100
WAIT_S = 600.0


def make_flow(org: str, pushes: Sequence[Push], *, flow_id: str, broken: bool = False) -> windrow.Workflow:
    """Makes the graph. For each project there are many nodes, which count one part each, and a node that adds up their
    counts. The node that writes the report waits for all sums.

    `broken`: makes the first part unreadable."""
    by_project: dict[str, list[Push]] = defaultdict(list)
    for push in pushes:
        by_project[push.org].append(push)

    flow = windrow.Workflow("report", org=org, id=flow_id)
    sums: list[windrow.Node] = []
    for project, theirs in by_project.items():
        parts: list[windrow.Node] = []
        for first in range(0, len(theirs), PART):
            payload = b"\n".join(push.to_json() for push in theirs[first : first + PART])
            if broken and not sums and not parts:
                payload = b"no push at all"
            parts.append(
                flow.job(QUEUE, "count", payload, name=f"{project} {first // PART}", attributes={"project": project})
            )
        sums.append(flow.job(QUEUE, "add", name=project, after=parts))
    flow.job(QUEUE, "write_report", name="report", after=sums)
    flow.on_failure(QUEUE, "raise_alarm", name="alarm")
    return flow


def plain(pushes: Sequence[Push]) -> dict[str, list[int]]:
    """Computes the report without any queue: the pushes, files, insertions and deletions of each project."""
    report: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for push in pushes:
        figures = (1, push.files, push.insertions, push.deletions)
        report[push.org] = [old + more for old, more in zip(report[push.org], figures, strict=True)]
    return dict(report)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a report of recorded pushes.")
    parser.add_argument("org")
    parser.add_argument("--pushes", type=int, metavar="N", help="only the first N of 19,349")
    parser.add_argument("--id", default=windrow.uuid7(), help="of the workflow; with the same one it is started once")
    parser.add_argument("--broken", action="store_true", help="with a part that cannot be read")
    given = parser.parse_args()
    pushes = read_pushes(most=given.pushes)
    with windrow.SyncClient(org=given.org) as client:
        flow = make_flow(given.org, pushes, flow_id=given.id, broken=given.broken)
        started = client.start(flow)
        print("known:" if started.duplicate else "started:", started.id, f"{len(flow.nodes)} nodes", flush=True)
        report = client.wait(started.job_ids["report"], timeout=WAIT_S)
    if report.state is not windrow.JobState.SUCCEEDED:
        sys.exit(f"no report: {report.reason}")
    found = json.loads(report.result or b"{}")
    for project, (count, *_, insertions, deletions) in sorted(found.items()):
        print(f"{project:20} {count:6,} pushes  +{insertions:,} -{deletions:,}")
    if found != plain(pushes):
        sys.exit("WRONG: the plain computation has other totals")
    print("equal: the plain computation has the same totals")


if __name__ == "__main__":
    main()
