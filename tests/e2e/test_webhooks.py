"""The webhooks example under faults, and the commands of its page."""

from __future__ import annotations

import shlex
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.conftest import RunningCluster
from tests.e2e.programs import call, started
from tests.e2e.test_readme import blocks, run
from tests.routers import reserved_address, until
from windrow import SyncClient, uuid7

EVENTS, ENDPOINTS = 60, 6


def test_each_event_takes_effect_once_though_the_receiver_is_down_and_a_worker_is_killed(
    cluster: RunningCluster,
) -> None:
    org = f"shop-{uuid7()}"
    with (
        ExitStack() as receivers,
        reserved_address() as address,
        SyncClient(cluster.address, org=org) as client,
        started(cluster, "examples.webhooks.api", "--port", "0", "--retry", "0.1", listens=True) as (_, api),
        started(cluster, "examples.webhooks.worker", org, "--window", "2") as (doomed, _),
    ):
        receiver, port = f"http://{address}", address.rpartition(":")[2]

        def send(number: int, path: str) -> bool:
            event = {"id": f"evt_{number}", "endpoint": receiver + path, "data": {"number": number}}
            return bool(call(f"{api}/{org}/events", event)["duplicate"])

        assert not any(send(number, f"/hooks/{number % ENDPOINTS}") for number in range(EVENTS))
        assert all(send(number, f"/hooks/{number % ENDPOINTS}") for number in range(0, EVENTS, 7))
        until(lambda: client.stats("webhooks").queues["webhooks"].scheduled, "a delivery fails and is retried")
        receivers.enter_context(started(cluster, "examples.webhooks.receiver", "--port", port, listens=True))
        until(lambda: call(receiver)["effects"] >= EVENTS // 4, "deliveries arrive")
        doomed.send_signal(signal.SIGKILL)
        with started(cluster, "examples.webhooks.worker", org, "--window", "2"):
            until(
                lambda: client.stats("webhooks", include_finished=True).queues["webhooks"].succeeded == EVENTS,
                "all are delivered",
            )
            found = call(receiver)
            assert found["effects"] == EVENTS
            assert found["requests"] >= EVENTS

            assert not send(EVENTS, "/gone")
            until(lambda: client.stats("webhooks").queues["webhooks"].dead, "the delivery is given up")
            call(f"{receiver}/repair", {})
            assert client.redrive_queue("webhooks") == 1
            until(lambda: call(receiver)["effects"] == EVENTS + 1, "the delivery takes effect after its redrive")

            # The commands of the page need a schedule, which the worker declares.
            until(client.list_schedules, "a schedule")
            commands_of_the_page_work(cluster, org)


def commands_of_the_page_work(cluster: RunningCluster, org: str) -> None:
    lines = [line for block in blocks("examples/webhooks/README.md", "console") for line in block.splitlines()]
    assert len(lines) >= 6
    for line in lines:
        command = line.removeprefix("$ ./run windrow ").replace(" shop", f" {org}")
        done = run([str(Path(sys.executable).parent / "windrow"), *shlex.split(command)], cluster)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
