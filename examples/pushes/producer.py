"""Enqueues recorded pushes in their recorded order, each as a job of its org.

python -m examples.pushes.producer --address 127.0.0.1:7419
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import log1p

import windrow
from examples.pushes.totals import Push, read_pushes

QUEUE = "pushes"
KIND = "push"

# How many pushes are sent at once. One call stores those of one org, and the next pushes are sent after all of these
# are acknowledged. So an org's jobs are stored in recorded order. A job overtakes fewer than this many jobs of other
# orgs.
WINDOW = 500
DELAYED_EVERY = 10
DELAY_S_MAX = 5.0

_STEP_S = 0.25
_PAUSE_S = 0.2
_RETRY_S_MAX = 180.0
_RETRIED = (windrow.Unavailable, windrow.DeadlineExceeded, windrow.ResourceExhausted, windrow.RouterError)
_log = logging.getLogger("producer")


def delays_s(pushes: Sequence[Push]) -> list[float]:
    """Returns each job's delay. For every tenth push, this is the recorded gap before the push, compressed; for other
    pushes it is 0.

    The gap is the time since the previous push to the same repository (none: 0), and

        delay = 5 s × ln(1 + gap) ÷ ln(1 + the longest gap of all)

    Gaps range from a second to years: on a linear scale almost all delays would be close to 0.
    """
    latest: dict[str, int] = {}
    gaps: list[int] = []
    for push in pushes:
        gaps.append(push.at - latest.get(push.repo, push.at))
        latest[push.repo] = push.at
    longest = max(gaps, default=0)
    return [
        DELAY_S_MAX * log1p(gap) / log1p(longest) if gap and number % DELAYED_EVERY == 0 else 0.0
        for number, gap in enumerate(gaps, start=1)
    ]


def job_of(push: Push, delay_s: float) -> windrow.NewJob:
    """Makes the job of a push. This function makes the id of the job, a UUIDv7, so the job is stored once even if it is
    sent again."""
    return windrow.NewJob(QUEUE, KIND, push.to_json(), delay=delay_s or None)


async def produce(
    address: str,
    pushes: Sequence[Push],
    *,
    acknowledged: Callable[[str, Sequence[windrow.Enqueued]], None],
    seconds: float = 0.0,
) -> None:
    """Enqueues all pushes, and calls `acknowledged` with each org's stored jobs. With `seconds`, spreads the calls
    evenly over that time. Raises an ExceptionGroup of windrow.Client's errors after 3 minutes of failed tries."""
    if not pushes:
        return
    delays = delays_s(pushes)
    size = max(1, min(WINDOW, round(len(pushes) * _STEP_S / seconds))) if seconds else WINDOW
    began_s = time.monotonic()
    async with windrow.Client(address, org=pushes[0].org, channels=2) as client:
        for first in range(0, len(pushes), size):
            # If these pushes are late, do not sleep, so that the rate catches up.
            await asyncio.sleep(began_s + seconds * first / len(pushes) - time.monotonic())
            jobs: dict[str, list[windrow.NewJob]] = defaultdict(list)
            for at in range(first, min(first + size, len(pushes))):
                jobs[pushes[at].org].append(job_of(pushes[at], delays[at]))
            async with asyncio.TaskGroup() as group:
                for org in jobs:
                    group.create_task(_send(client.for_org(org), jobs[org], acknowledged))


async def _send(
    client: windrow.Client,
    jobs: Sequence[windrow.NewJob],
    acknowledged: Callable[[str, Sequence[windrow.Enqueued]], None],
) -> None:
    """Sends jobs until they are stored. The client retries for its `timeout`; this function continues after that. A
    call without an answer may have stored the jobs or not. The next try is safe in both cases, because the jobs have
    the same ids."""
    deadline_s = time.monotonic() + _RETRY_S_MAX
    while True:
        try:
            stored = await client.enqueue_many(jobs)
        except _RETRIED as error:
            if time.monotonic() > deadline_s:
                raise
            _log.warning("trying again: %s", error)
            await asyncio.sleep(_PAUSE_S)
        else:
            acknowledged(client.org, stored)
            return


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.pushes.producer")
    parser.add_argument("--address", default="127.0.0.1:7419", help="HOST:PORT of the routers")
    parser.add_argument("--events", type=int, help="enqueue only the first EVENTS pushes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stored = 0

    def count(_org: str, jobs: Sequence[windrow.Enqueued]) -> None:
        nonlocal stored
        stored += len(jobs)

    asyncio.run(produce(arguments.address, read_pushes(most=arguments.events), acknowledged=count))
    print(f"{stored:,} jobs enqueued")


if __name__ == "__main__":
    main()
