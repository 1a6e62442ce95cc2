"""Imports feeds: makes a job of each row. Uses a loop instead of a `windrow.Worker`. The loop takes a job, extends the
lease of the job while the work lasts, and acks the job.

python -m examples.importer.loader shop
"""

from __future__ import annotations

import argparse
import logging
import os
import time

import windrow
from examples.importer.feeds import FEEDS, IMPORTS, ROWS, rows_of

# How long a call waits for a job.
WAIT_S = 20.0
# The pause after a dequeue that failed, if the router does not ask for another pause.
PAUSE_S = 1.0

log = logging.getLogger("loader")


class LeaseLost(Exception):
    """Another program has the job, or will get it. So this program stops its work on the job."""


def load(client: windrow.SyncClient, job: windrow.Job, *, window_s: float, slow_s: float) -> windrow.Batch:
    """Stores the rows of a feed as jobs. May be repeated after a crash: the batch's id is the id of the import's job.
    So for 7 days after the import was asked for, jobs that are already stored are not stored again."""
    feed = str(job.json()["feed"])

    def keep_lease(done: windrow.Batch) -> None:
        time.sleep(slow_s)
        progress = windrow.Progress(done=done.jobs, total=FEEDS[feed], note=feed)
        if client.extend(job, visibility_window=window_s, progress=progress) is not windrow.Answer.OK:
            raise LeaseLost

    rows = (windrow.NewJob(ROWS, "index_row", row) for row in rows_of(feed))
    return client.enqueue_batch(rows, batch=job.id, on_progress=keep_lease)


def work(client: windrow.SyncClient, job: windrow.Job, *, window_s: float, slow_s: float) -> None:
    """Works on one job and reports its outcome. Raises no error if the job fails or if no router answers, so that the
    loop continues."""
    try:
        try:
            done = load(client, job, window_s=window_s, slow_s=slow_s)
        except LeaseLost:
            return
        except Exception as error:
            # The payload may be unreadable, for example. Another attempt follows; after the last attempt, the job is
            # dead.
            log.exception("job %s failed", job.id)
            client.nack(job, error=error)
        else:
            client.ack(job, result={"rows": done.jobs, "known": done.duplicates})
    except windrow.WindrowError as error:
        # The lease expires, and the job is delivered again.
        log.warning("the outcome of job %s is not reported: %s", job.id, error)


def take(client: windrow.SyncClient, name: str, *, window_s: float) -> list[windrow.Job]:
    """Leases a job. Returns no job if none is due, or if no router answers."""
    try:
        return client.dequeue(IMPORTS, visibility_window=window_s, worker=name, wait=WAIT_S)
    except (windrow.InvalidRequest, windrow.PermissionDenied, windrow.TlsFailed, windrow.RouterTooOld):
        # Trying again does not help.
        raise
    except windrow.WindrowError as error:
        # The client has already tried for 30 s.
        log.warning("no job can be taken: %s", error)
        time.sleep(error.retry_after or PAUSE_S)
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description="Imports feeds.")
    parser.add_argument("org")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="the visibility window; default: 30")
    parser.add_argument(
        "--slow", type=float, default=0.0, metavar="S", help="more time for each 1,000 rows, to watch it"
    )
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    name = f"loader-{os.getpid()}"
    with windrow.SyncClient(org=given.org) as client:
        while True:
            for job in take(client, name, window_s=given.window):
                work(client, job, window_s=given.window, slow_s=given.slow)


if __name__ == "__main__":
    main()
