"""The report example under faults, and the commands of its page."""

from __future__ import annotations

import signal

from tests.e2e.conftest import RunningCluster
from tests.e2e.programs import Page, list_all
from tests.e2e.test_readme import run
from tests.routers import first_line, until
from windrow import JobState, NodeState, SyncClient, WorkflowState, uuid7


def alarms(client: SyncClient) -> int:
    return len(list_all(client, "report", kind="raise_alarm", state=JobState.SUCCEEDED))


def test_the_totals_of_a_report_are_right_though_its_workers_and_its_starter_are_killed(
    cluster: RunningCluster,
) -> None:
    org, flow_id = f"acme-{uuid7()}", uuid7()
    page = Page("report", cluster, {"acme": org, "01a21440-0b01-71d2-a06a-83e638bceafb": flow_id})
    with SyncClient(cluster.address, org=org) as client:

        def counts() -> dict[NodeState, int]:
            return client.get_workflow(flow_id)[1]

        with page.started("--pushes 5000", "--id", flow_id) as (starter, _):
            assert first_line(starter).startswith(f"started: {flow_id}")
            nodes = sum(counts().values())
            assert nodes > 60
            # Each part of the report takes so long that the kill comes in the middle of a part.
            with page.started("report.worker", "--window", "1", "--slow", "0.3") as (doomed, _):
                until(lambda: counts()[NodeState.SUCCEEDED] >= 5, "parts are counted")
                doomed.send_signal(signal.SIGKILL)
            starter.send_signal(signal.SIGKILL)
        cluster.kill()
        cluster.start()
        assert counts()[NodeState.SUCCEEDED] < nodes // 2

        with page.started("report.worker", "--slow", "0"):
            said = page.run("--pushes 5000", "--id", flow_id)
            assert said.startswith(f"known: {flow_id}")
            assert said.endswith("equal: the plain computation has the same totals\n")
            until(lambda: client.get_workflow(flow_id)[0].state is WorkflowState.SUCCEEDED, "the workflow has ended")

            broken_id = uuid7()
            broken = run([*page.command("--broken"), "--id", broken_id], cluster)
            assert broken.returncode == 1
            assert "no report: " in broken.stderr
            until(lambda: alarms(client), "the alarm is raised")
            assert client.get_workflow(broken_id)[0].state is WorkflowState.FAILED
            assert alarms(client) == 1
        page.run_the_others()
