"""Defines the feeds and the queues, and runs the hosts that ask for imports. Several hosts may ask for the same feed at
the same time.

python -m examples.importer.feeds shop coats hats shoes ties --hosts 4
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import windrow

IMPORTS, ROWS = "imports", "rows"
# The supplier's server allows this many downloads at a time.
AT_ONCE = 2
# These feeds stand for files that a supplier offers. Each has a name and a number of products.
FEEDS = {"coats": 5000, "hats": 900, "shoes": 1200, "ties": 300}
# One of this many rows is broken.
BROKEN_EVERY = 250


def rows_of(feed: str) -> Iterator[dict[str, str | int]]:
    """Downloads a feed, row by row."""
    for number in range(1, FEEDS[feed] + 1):
        yield {"sku": f"{feed}-{number}", "cents": -1 if number % BROKEN_EVERY == 0 else 999 + number}


def ask(client: windrow.SyncClient, feeds: Sequence[str]) -> list[windrow.Enqueued]:
    """Asks for imports. While an import of a feed waits or runs, the feed is not imported twice."""
    jobs = [
        windrow.NewJob(
            IMPORTS,
            "import_feed",
            {"feed": feed},
            attributes={"feed": feed},
            # The imports of all feeds of one supplier are a group. A setting of the queue says how many jobs of a group
            # may be leased at the same time.
            group="supplier",
            dedup_key=feed,
            # The dedup key can be used again as soon as the import has ended.
            dedup_while_live=True,
        )
        for feed in feeds
    ]
    return client.enqueue_many(jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks for imports of feeds.")
    parser.add_argument("org")
    parser.add_argument("feeds", nargs="+", choices=sorted(FEEDS), metavar="FEED", help=", ".join(FEEDS))
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="as if so many hosts asked; default: 1")
    given = parser.parse_args()
    with windrow.SyncClient(org=given.org) as client, ThreadPoolExecutor(given.hosts) as hosts:
        client.put_queue(IMPORTS, group_concurrency=AT_ONCE)
        asked = [hosts.submit(ask, client, given.feeds) for _ in range(given.hosts)]
        stored = [one for answer in asked for one in answer.result()]
    known = sum(one.duplicate for one in stored)
    print(f"{len(stored) - known} imports are new, {known} were under way")


if __name__ == "__main__":
    main()
