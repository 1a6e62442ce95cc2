"""Pays orders: takes the money at the bank, and writes the order's state. Any number of workers may run.

python -m examples.payments.worker shop --bank http://127.0.0.1:9100 --file shop.db
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from urllib.request import Request, urlopen

import windrow
from examples.payments.shop import KIND, QUEUE, Fence, Orders

# Less than the visibility window, so that a thread does not wait long for a bank that does not answer.
ANSWER_S = 20.0
CONCURRENCY = 8

_log = logging.getLogger("payments")


def take(bank: str, order: dict[str, str | int]) -> bool:
    """Takes the money at the bank. Returns False if the customer has too little."""
    request = Request(
        f"{bank}/charges",
        data=json.dumps({"customer": order["customer"], "cents": order["cents"]}).encode(),
        # Use the id of the order as the key, and not the id of a job or an attempt: so each repetition is the same
        # payment, no matter who asks.
        headers={"Content-Type": "application/json", "Idempotency-Key": str(order["order"])},
    )
    try:
        with urlopen(request, timeout=ANSWER_S) as answer:
            return bool(json.load(answer)["taken"])
    except OSError as error:
        # Nobody knows whether the money was taken. Trying again is safe, because the next attempt has the same key.
        raise windrow.Retry(f"no answer of the bank: {error}") from error


def make_worker(org: str, bank: str, file: Path, *, window_s: float) -> windrow.Worker:
    orders = Orders(file)
    worker = windrow.Worker(windrow.Client(org=org), QUEUE, concurrency=CONCURRENCY, visibility_window=window_s)

    @worker.handler(KIND)
    def charge(job: windrow.Job) -> dict[str, str] | None:
        order, fence = job.json(), Fence.of(job)
        if not orders.write(order["order"], "charging", fence):
            return None
        # A declined payment is an answer, and not a failure, so there is nothing to try again.
        state = "paid" if take(bank, order) else "declined"
        if not orders.write(order["order"], state, fence):
            # The lease has ended, so the returned value changes nothing in Windrow either.
            _log.warning("%s: attempt %d is late; another worker has the order", order["order"], job.attempt)
            return None
        return {"state": state}

    return worker


def main() -> None:
    parser = argparse.ArgumentParser(description="Pays the orders of a shop.")
    parser.add_argument("org")
    parser.add_argument("--bank", default="http://127.0.0.1:9100", metavar="URL")
    parser.add_argument("--file", type=Path, default=Path("shop.db"), help="the shop's database; default: shop.db")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="the visibility window; default: 30")
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    windrow.run(make_worker(given.org, given.bank, given.file, window_s=given.window))


if __name__ == "__main__":
    main()
