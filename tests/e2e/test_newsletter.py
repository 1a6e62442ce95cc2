"""The newsletter example under faults, and the commands of its page."""

from __future__ import annotations

import json
import signal
from bisect import bisect_left
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from examples.newsletter.newsletter import DIGESTS, EVERY, MAILS, TZ, Subscribers
from tests.e2e.conftest import RunningCluster
from tests.e2e.programs import Page, call, list_all
from tests.routers import reserved_address, until
from windrow import JobState, SyncClient, uuid7

SUBSCRIBERS = 60
# How many mails per second the mail server of the page takes.
MAILS_PER_S = 50


def most_in_a_second(times: list[datetime]) -> int:
    times = sorted(times)
    return max(at + 1 - bisect_left(times, time - timedelta(seconds=1)) for at, time in enumerate(times))


def test_each_subscriber_gets_an_issue_once_and_the_rate_holds_though_a_web_process_is_killed(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    org = f"news-{uuid7()}"
    addresses = dict.fromkeys(("9200", "8001", "8002"), "")
    with ExitStack() as programs, SyncClient(cluster.address, org=org) as client:
        for port in addresses:
            addresses[port] = programs.enter_context(reserved_address())
        mail_server, fastapi, django = (f"http://{address}" for address in addresses.values())
        replaced = {
            "news": org,
            "newsletter.db": str(tmp_path / "newsletter.db"),
            "http://127.0.0.1:9200": mail_server,
            "http://127.0.0.1:8001/subscribers": f"{fastapi}/subscribers",
            "http://127.0.0.1:8002/subscribers": f"{django}/subscribers",
        }
        ports = {port: address.rpartition(":")[2] for port, address in addresses.items()}
        page = Page("newsletter", cluster, replaced | ports)
        subscribers = Subscribers(tmp_path / "newsletter.db")
        for number in range(SUBSCRIBERS - 2):
            subscribers.add(f"user{number}@example.com")

        def is_up(url: str) -> Any:
            with suppress(OSError):
                return call(f"{url}/health")

        page.run("limits set")
        doomed, _ = programs.enter_context(page.started("fastapi_app"))
        programs.enter_context(page.started("django_app"))
        until(lambda: is_up(fastapi) and is_up(django), "both applications are up")
        for who in ("ada@example.com", "bob@example.com"):
            # The test sends the body of the curl command itself, because not every machine has curl.
            _, _, body, _, _, url = page.command(who)
            call(url, json.loads(body))

        until(client.list_schedules, "a worker has declared the schedule")
        (schedule,) = client.list_schedules()
        assert (schedule.name, schedule.schedule.cron, schedule.schedule.tz) == ("send_digest", EVERY, TZ)
        page.run("schedules trigger")
        until(lambda: client.stats(MAILS).queues[MAILS].scheduled, "a mail failed, and is retried")
        programs.enter_context(page.started("mail_server", listens=True))
        until(lambda: call(mail_server)["sent"] >= SUBSCRIBERS // 4, "mails are sent")
        doomed.send_signal(signal.SIGKILL)
        cluster.kill()
        cluster.start()

        # Each subscriber gets the issue, and two people get a welcome mail.
        mails = SUBSCRIBERS + 2
        until(lambda: client.stats(MAILS, include_finished=True).queues[MAILS].succeeded == mails, "every mail is sent")
        assert call(mail_server)["sent"] == mails
        jobs = list_all(client, MAILS, state=JobState.SUCCEEDED)
        starts = [attempt.leased_at for job in jobs for attempt in job.attempts]
        assert len(starts) >= mails
        assert most_in_a_second(starts) <= MAILS_PER_S
        (digest,) = list_all(client, DIGESTS, state=JobState.SUCCEEDED)
        assert digest.result is not None
        assert b'"mails":60' in digest.result
        page.run_the_others()
