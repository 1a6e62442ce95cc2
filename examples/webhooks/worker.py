"""Delivers the events of one or more orgs. Any number of workers may run.

python -m examples.webhooks.worker shop other-shop
"""

from __future__ import annotations

import argparse
import json
import logging
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import windrow
from examples.webhooks.api import KIND, QUEUE

# How long an endpoint may take to answer, and how long a whole attempt may take.
ANSWER_S = 5.0
ATTEMPT_S = 10.0
CONCURRENCY = 20
UPKEEP = "webhooks-upkeep"

_log = logging.getLogger("webhooks")


def deliver(job: windrow.Job) -> dict[str, int]:
    """Sends an event to its endpoint. Any answer except 2xx fails the attempt. The handler raises `Retry`, so that the
    log has no traceback for each failure of somebody else's server."""
    event = job.json()
    request = Request(
        event["endpoint"],
        data=json.dumps(event.get("data")).encode(),
        # An endpoint may get an event again, and recognises it by this key.
        headers={"Content-Type": "application/json", "Idempotency-Key": event["id"]},
    )
    try:
        with urlopen(request, timeout=ANSWER_S) as answer:
            return {"status": answer.status}
    except HTTPError as error:
        with error:
            if error.code == 410:
                raise windrow.Kill("the endpoint is gone") from error
            # If there is no such header, `after` is None, and the job's retry policy decides.
            after = error.headers.get("Retry-After", "")
            why = f"the endpoint answered {error.code}"
            raise windrow.Retry(why, after=int(after) if after.isdecimal() else None) from error
    except OSError as error:
        raise windrow.Retry(f"no answer: {error}") from error


def make_worker(org: str, *, window_s: float) -> windrow.Worker:
    client = windrow.Client(org=org)
    worker = windrow.Worker(client, [QUEUE, UPKEEP], concurrency=CONCURRENCY, visibility_window=window_s)
    worker.handler(KIND, timeout=ATTEMPT_S)(deliver)

    @worker.every("* * * * *", queue=UPKEEP)
    async def report_dead(_: windrow.Job) -> None:
        """Logs how many deliveries were given up. A schedule calls this once a minute."""
        counts = (await client.stats(QUEUE)).queues.get(QUEUE)
        if counts is not None and counts.dead:
            _log.warning("org %s: %d deliveries were given up", org, counts.dead)

    return worker


def main() -> None:
    parser = argparse.ArgumentParser(description="Delivers the events of orgs.")
    parser.add_argument("orgs", nargs="+", metavar="ORG")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="the visibility window; default: 30")
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    windrow.run(*(make_worker(org, window_s=given.window) for org in given.orgs))


if __name__ == "__main__":
    main()
