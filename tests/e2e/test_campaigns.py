"""The campaigns example under faults, and the commands of its page."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from datetime import datetime, timedelta

from examples.campaigns.plan import QUEUE, STEPS
from tests.e2e.conftest import RunningCluster
from tests.e2e.programs import Page, call, list_all
from tests.routers import reserved_address, until
from windrow import JobFilter, JobState, SyncClient, uuid7

PEOPLE = 20


def test_everybody_gets_each_message_that_is_due_once_though_plans_change_and_a_worker_is_killed(
    cluster: RunningCluster,
) -> None:
    org = f"shop-{uuid7()}"
    others = [f"user{number}@example.com" for number in range(PEOPLE - 2)]
    with ExitStack() as programs, reserved_address() as address, SyncClient(cluster.address, org=org) as client:
        mail_server = f"http://{address}"
        replaced = {"shop": org, "9200": address.rpartition(":")[2], "http://127.0.0.1:9200": mail_server}
        page = Page("campaigns", cluster, replaced)

        def times_of_bob() -> dict[str, datetime]:
            jobs = list_all(client, QUEUE, attributes={"person": "bob@example.com"})
            return {job.attributes["step"]: job.run_at for job in jobs}

        def sent(step: str) -> int:
            return client.count_jobs(JobFilter(attributes={"step": step}, states=[JobState.SUCCEEDED]))

        planned = len(STEPS) * PEOPLE
        assert page.run("plan shop start", *others) == f"{planned} messages are planned\n"
        assert page.run("plan shop start", *others) == "0 messages are planned\n"
        assert page.run("plan shop stop") == f"{len(STEPS)} messages are cancelled\n"

        doomed, _ = programs.enter_context(page.started("campaigns.worker", "--window", "1"))
        until(
            lambda: client.list_jobs(QUEUE, attributes={"step": "hello"}).jobs[0].attempts,
            "no answer of the mail server",
        )
        greetings = JobFilter(attributes={"step": "hello"}, states=[JobState.SCHEDULED])
        until(lambda: client.count_jobs(greetings), "the mail server does not answer")
        programs.enter_context(page.started("mail_server", listens=True))
        until(lambda: sent("hello") == PEOPLE - 1, "everybody but ada is greeted")

        before = times_of_bob()
        assert page.run("plan shop move") == f"{len(STEPS) - 1} messages are moved\n"
        after = times_of_bob()
        assert {step: after[step] - time for step, time in before.items()} == {
            step: timedelta(days=0 if step == "hello" else 7) for step in STEPS
        }

        page.run("--where step=survey")
        until(lambda: sent("survey") >= 1, "surveys go out")
        doomed.send_signal(signal.SIGKILL)
        cluster.kill()
        cluster.start()
        programs.enter_context(page.started("campaigns.worker", "--window", "1"))
        until(lambda: sent("survey") == PEOPLE - 1, "everybody but ada gets the survey")

        # Bob's remaining messages become due 400 days earlier.
        assert page.run("plan shop move", "--days", "-400") == f"{len(STEPS) - 2} messages are moved\n"
        until(lambda: sent("anniversary") == 1, "a year is over")
        page.run("--where step=anniversary")
        # The tips and the offers for the other people remain.
        waiting = client.stats(QUEUE).queues[QUEUE]
        assert (waiting.scheduled, waiting.ready, waiting.leased, waiting.dead) == (2 * (PEOPLE - 2), 0, 0, 0)
        assert call(mail_server)["sent"] == 2 * (PEOPLE - 1) + 3

        lines = page.run("durations").splitlines()
        assert {line.split()[0]: int(line.split()[1]) for line in lines[1:]} == {
            "hello": PEOPLE - 1,
            "survey": PEOPLE - 1,
            "tips": 1,
            "offer": 1,
            "anniversary": 1,
        }
        page.run_the_others()
