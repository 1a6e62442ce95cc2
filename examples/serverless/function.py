"""A function of a serverless platform. It takes one job, works on it, and ends. The scaler starts as many functions as
are needed.

python -m examples.serverless.function shop
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import windrow
from examples.serverless.images import QUEUE


def make_thumbnail(image: int, *, slow_s: float) -> str:
    time.sleep(slow_s)
    return f"thumbnail of image {image}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes one job, works it, and ends.")
    parser.add_argument("org")
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="S", help="how long a function may run; default: 60"
    )
    parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="how much longer a job takes, to watch it")
    given = parser.parse_args()
    with windrow.SyncClient(org=given.org) as client:
        # The platform ends a function after a time limit. The lease lasts for the same time, so the function need not
        # extend it. If the platform ends the function, the lease expires, and the job is delivered again.
        jobs = client.dequeue(QUEUE, visibility_window=given.limit, worker=f"function-{os.getpid()}")
        if not jobs:
            # Other functions have taken all jobs, so this function was started in vain.
            return
        (job,) = jobs
        try:
            thumbnail = make_thumbnail(job.json()["image"], slow_s=given.slow)
        except Exception as error:  # noqa: BLE001 - the history has its traceback
            client.nack(job, error=error)
            sys.exit(1)
        client.ack(job, result={"thumbnail": thumbnail})


if __name__ == "__main__":
    main()
