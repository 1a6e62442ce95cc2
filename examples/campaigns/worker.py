"""Sends the messages that are due. Any number of workers may run.

python -m examples.campaigns.worker shop --mail http://127.0.0.1:9200
"""

from __future__ import annotations

import argparse
import logging

import windrow
from examples.campaigns.plan import KIND, QUEUE
from examples.newsletter.newsletter import send_mail


def make_worker(org: str, mail: str, *, window_s: float) -> windrow.Worker:
    worker = windrow.Worker(windrow.Client(org=org), QUEUE, visibility_window=window_s)

    @worker.handler(KIND)
    def send_message(job: windrow.Job) -> None:
        send_mail(job, mail)

    return worker


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends the messages of a campaign.")
    parser.add_argument("org")
    parser.add_argument("--mail", default="http://127.0.0.1:9200", metavar="URL", help="the mail server")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="the visibility window; default: 30")
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    windrow.run(make_worker(given.org, given.mail, window_s=given.window))


if __name__ == "__main__":
    main()
