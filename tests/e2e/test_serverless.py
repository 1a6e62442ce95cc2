"""The serverless example under faults, and the commands of its page."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import psutil
import pytest

from examples.serverless.images import QUEUE
from examples.serverless.scaler import to_start
from tests.e2e.conftest import RunningCluster
from tests.e2e.programs import Page, first, list_all, most_at_once
from tests.routers import until
from windrow import AttemptOutcome, JobState, SyncClient, uuid7

IMAGES, MOST = 6, 3


@pytest.mark.parametrize(
    ("ready", "leased", "running", "wanted"),
    [
        (0, 0, 0, 0),
        (5, 0, 0, 3),
        (2, 0, 0, 2),
        # Two functions are running without a lease, and will take two of the five jobs.
        (5, 0, 2, 1),
        (2, 0, 2, 0),
        (5, 3, 3, 0),
        # One of the two running functions has no job yet.
        (1, 1, 2, 0),
        # A function was killed, and its lease has not ended yet.
        (0, 1, 0, 0),
        # This scaler did not start the functions that hold leases.
        (5, 2, 0, 1),
        (5, 9, 0, 0),
    ],
)
def test_a_function_is_started_for_each_job_that_no_other_will_take(
    ready: int, leased: int, running: int, wanted: int
) -> None:
    assert to_start(ready=ready, leased=leased, running=running, most=MOST) == wanted


def test_each_job_is_worked_by_a_function_of_its_own_though_functions_and_the_scaler_are_killed(
    cluster: RunningCluster,
) -> None:
    org = f"shop-{uuid7()}"
    page = Page("serverless", cluster, {"shop": org, "4": str(MOST)})
    page.run("limits set")
    options = ("--interval", "0.5", "--slow", "1", "--limit", "3")
    with ExitStack() as programs, SyncClient(cluster.address, org=org) as client:

        def leased() -> list[int]:
            """Returns the numbers of the functions that have a job."""
            jobs = list_all(client, QUEUE, state=JobState.LEASED)
            return [int(job.worker.removeprefix("function-")) for job in jobs]

        scaler, _ = programs.enter_context(page.started("scaler", *options))
        page.run("images", "--images", str(IMAGES))
        os.kill(first(leased, "a function has a job"), signal.SIGKILL)
        scaler.send_signal(signal.SIGKILL)
        cluster.kill()
        cluster.start()
        second, _ = programs.enter_context(page.started("scaler", *options))
        until(
            lambda: client.stats(QUEUE, include_finished=True).queues[QUEUE].succeeded == IMAGES,
            "each image has a thumbnail",
        )
        jobs = list_all(client, QUEUE, state=JobState.SUCCEEDED)
        attempts = [attempt for job in jobs for attempt in job.attempts]
        assert AttemptOutcome.EXPIRED in {attempt.outcome for attempt in attempts}
        # If the answer to a claim was lost with the router, the function claimed again, and the lease of the lost
        # answer expired.
        functions = [attempt.worker for attempt in attempts if attempt.outcome is not AttemptOutcome.EXPIRED]
        assert len(set(functions)) == len(functions)
        assert most_at_once(jobs) <= MOST
        until(lambda: not psutil.Process(second.pid).children(), "no function runs")
        page.run_the_others()
