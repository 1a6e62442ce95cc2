"""The importer example under faults, and the commands of its page."""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

from examples.importer.feeds import AT_ONCE, BROKEN_EVERY, FEEDS, IMPORTS, ROWS
from examples.importer.indexer import Products
from tests.e2e.conftest import RunningCluster
from tests.e2e.programs import Page, first, list_all, most_at_once
from tests.routers import until
from windrow import JobState, SyncClient, uuid7

BROKEN = sum(rows // BROKEN_EVERY for rows in FEEDS.values())


def test_each_feed_is_imported_once_and_two_at_a_time_though_a_loader_and_an_indexer_are_killed(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    org = f"shop-{uuid7()}"
    page = Page("importer", cluster, {"shop": org, "products.db": str(tmp_path / "products.db")})
    with ExitStack() as programs, SyncClient(cluster.address, org=org) as client:
        assert page.run("--hosts 4") == "4 imports are new, 12 were under way\n"
        # The import of the largest feed takes longer than the window, so its lease must be extended.
        quick = ("--window", "3", "--slow", "0.8")
        loaders = [programs.enter_context(page.started("importer.loader", *quick))[0] for _ in range(3)]

        def holders() -> list[subprocess.Popen[str]]:
            workers = {job.worker for job in list_all(client, IMPORTS, state=JobState.LEASED)}
            return [one for one in loaders if f"loader-{one.pid}" in workers]

        doomed = first(holders, "a feed is being imported")
        doomed.send_signal(signal.SIGKILL)
        with page.started("importer.indexer", "--window", "1") as (indexer, _):
            products = Products(tmp_path / "products.db")
            until(lambda: products.count() > 1000, "rows are written")
            indexer.send_signal(signal.SIGKILL)
        cluster.kill()
        cluster.start()
        programs.enter_context(page.started("importer.indexer", "--window", "1"))

        def succeeded(queue: str) -> int | None:
            return client.stats(queue, include_finished=True).queues[queue].succeeded

        until(lambda: succeeded(IMPORTS) == len(FEEDS), "every feed is imported")
        until(lambda: succeeded(ROWS) == sum(FEEDS.values()) - BROKEN, "every good row is written")
        assert products.count() == sum(FEEDS.values()) - BROKEN
        assert client.stats(ROWS).queues[ROWS].dead == BROKEN
        imports = list_all(client, IMPORTS, state=JobState.SUCCEEDED)
        assert sum(len(job.attempts) for job in imports) > len(FEEDS)
        assert most_at_once(imports) <= AT_ONCE

        # A feed whose import has ended may be imported again.
        for loader in loaders:
            loader.kill()
        assert page.run("--hosts 4") == "4 imports are new, 12 were under way\n"
        page.run_the_others()
