"""The webhooks example under faults, and the commands of its page."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.e2e.conftest import CHECKOUT, RunningCluster
from tests.e2e.test_readme import blocks, run
from tests.routers import first_line, reserved_address, until
from windrow import SyncClient, uuid7

EVENTS, ENDPOINTS = 60, 6


@contextmanager
def started(
    cluster: RunningCluster, program: str, *arguments: str, listens: bool = True
) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """Runs a program of the example. Yields the process, and its address if it listens."""
    with subprocess.Popen(
        [sys.executable, "-m", f"examples.webhooks.{program}", *arguments],
        cwd=CHECKOUT,
        env=os.environ | {"WINDROW_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, f"http://{first_line(process).split()[-1]}" if listens else ""
        finally:
            process.kill()


def call(url: str, body: object = None) -> Any:
    with urlopen(url, data=None if body is None else json.dumps(body).encode(), timeout=30) as answer:
        return json.load(answer)


def test_each_event_takes_effect_once_though_the_receiver_is_down_and_a_worker_is_killed(
    cluster: RunningCluster,
) -> None:
    org = f"shop-{uuid7()}"
    with (
        ExitStack() as receivers,
        reserved_address() as address,
        SyncClient(cluster.address, org=org) as client,
        started(cluster, "api", "--port", "0", "--retry", "0.1") as (_, api),
        started(cluster, "worker", org, "--window", "2", listens=False) as (doomed, _),
    ):
        receiver, port = f"http://{address}", address.rpartition(":")[2]

        def send(number: int, path: str) -> bool:
            event = {"id": f"evt_{number}", "endpoint": receiver + path, "data": {"number": number}}
            return bool(call(f"{api}/{org}/events", event)["duplicate"])

        assert not any(send(number, f"/hooks/{number % ENDPOINTS}") for number in range(EVENTS))
        assert all(send(number, f"/hooks/{number % ENDPOINTS}") for number in range(0, EVENTS, 7))
        until(lambda: client.stats("webhooks").queues["webhooks"].scheduled, "a delivery fails and is retried")
        receivers.enter_context(started(cluster, "receiver", "--port", port))
        until(lambda: call(receiver)["effects"] >= EVENTS // 4, "deliveries arrive")
        doomed.send_signal(signal.SIGKILL)
        with started(cluster, "worker", org, "--window", "2", listens=False):
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

            # The worker has declared its schedule.
            until(client.list_schedules, "a schedule")
            commands_of_the_page_work(cluster, org)


def commands_of_the_page_work(cluster: RunningCluster, org: str) -> None:
    lines = [line for block in blocks("examples/webhooks/README.md", "console") for line in block.splitlines()]
    assert len(lines) >= 6
    for line in lines:
        command = line.removeprefix("$ ./run windrow ").replace(" shop", f" {org}")
        done = run([str(Path(sys.executable).parent / "windrow"), *shlex.split(command)], cluster)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
