"""Starts as many functions as there are jobs, up to a limit. No function runs while there is no job.

python -m examples.serverless.scaler shop --most 4

Here a function is a process of this machine. On a platform for functions, _start() calls that platform.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections.abc import Sequence

import windrow
from examples.serverless.images import QUEUE

_log = logging.getLogger("scaler")


def to_start(*, ready: int, leased: int, running: int, most: int) -> int:
    """Returns how many functions to start. `running`: how many of the functions that this program has started still
    run.

    A running function without a job will take one of the ready jobs, so that job needs no other function. After a crash
    and restart, this program does not know the functions that it started before; most of them have leases. So a few
    functions too many may start. They find no job, because the queue's limit of jobs in flight is exact."""
    without_job = max(0, running - leased)
    return max(0, min(ready - without_job, most - max(running, leased)))


def capacity(client: windrow.SyncClient) -> tuple[int, int]:
    """Returns how many jobs are ready, and how many are leased."""
    # Ask for all queues, because a call for one queue fails if the queue does not exist yet.
    stats = client.stats().queues.get(QUEUE)
    return (0, 0) if stats is None or stats.paused else (stats.ready, stats.leased)


def _start(org: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "examples.serverless.function", org, *arguments])


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts functions, as many as there are jobs.")
    parser.add_argument("org")
    parser.add_argument("--most", type=int, default=4, metavar="N", help="functions at a time; default: 4")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="between two looks; default: 1")
    # The other arguments are for the functions.
    given, arguments = parser.parse_known_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    functions: list[subprocess.Popen[bytes]] = []
    with windrow.SyncClient(org=given.org) as client:
        while True:
            functions = [function for function in functions if function.poll() is None]
            try:
                ready, leased = capacity(client)
            except windrow.WindrowError as error:
                _log.warning("looking again: %s", error)
            else:
                count = to_start(ready=ready, leased=leased, running=len(functions), most=given.most)
                functions += [_start(given.org, arguments) for _ in range(count)]
                if count:
                    _log.info("%d ready, %d leased, %d functions run", ready, leased, len(functions))
            time.sleep(given.interval)


if __name__ == "__main__":
    main()
