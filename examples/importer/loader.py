"""Imports feeds: makes a job of each row. Uses a loop instead of a windrow.Worker: the loop takes a job, extends its
lease for as long as the work takes, and acks it.

python -m examples.importer.loader shop
"""

from __future__ import annotations

import argparse
import os
import time

import windrow
from examples.importer.feeds import FEEDS, IMPORTS, ROWS, rows_of

# How long a call waits for a job.
WAIT_S = 20.0


class LeaseLost(Exception):
    """Somebody else has the job, or will have it: more work on it here would be in vain."""


def load(client: windrow.SyncClient, job: windrow.Job, *, window_s: float, slow_s: float) -> windrow.Batch:
    """Stores the rows of a feed as jobs. May be repeated after a crash: the batch's id is the id of the import's job,
    so jobs that are stored are not stored again (for 7 days after the import was asked for)."""
    feed = str(job.json()["feed"])

    def keep_lease(done: windrow.Batch) -> None:
        time.sleep(slow_s)
        progress = windrow.Progress(done=done.jobs, total=FEEDS[feed], note=feed)
        if client.extend(job, visibility_window=window_s, progress=progress) is not windrow.Answer.OK:
            raise LeaseLost

    rows = (windrow.NewJob(ROWS, "index_row", row) for row in rows_of(feed))
    return client.enqueue_batch(rows, batch=job.id, on_progress=keep_lease)


def main() -> None:
    parser = argparse.ArgumentParser(description="Imports feeds.")
    parser.add_argument("org")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="the visibility window; default: 30")
    parser.add_argument(
        "--slow", type=float, default=0.0, metavar="S", help="more time for each 1,000 rows, to watch it"
    )
    given = parser.parse_args()
    name = f"loader-{os.getpid()}"
    with windrow.SyncClient(org=given.org) as client:
        while True:
            for job in client.dequeue(IMPORTS, visibility_window=given.window, worker=name, wait=WAIT_S):
                try:
                    done = load(client, job, window_s=given.window, slow_s=given.slow)
                except LeaseLost:
                    continue
                except windrow.WindrowError as error:
                    # If this fails too, the lease expires, and the job comes back.
                    client.nack(job, error=error)
                else:
                    client.ack(job, result={"rows": done.jobs, "known": done.duplicates})


if __name__ == "__main__":
    main()
