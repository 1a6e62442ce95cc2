"""The shop's orders, and the fence that keeps late workers from changing them.

python -m examples.payments.shop place shop --orders 20 --file shop.db
python -m examples.payments.shop report --file shop.db
"""

from __future__ import annotations

import argparse
import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import windrow

QUEUE = "payments"
KIND = "charge"
# An order costs 50 cents plus less than this amount.
CENTS_MAX = 2_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Fence(NamedTuple):
    """A value that is higher for each new lease of a job. After a retry, snooze, release or redrive, the job has a
    later due time, by the shard's clock. After a lease that expired, the job has the same due time and a higher
    attempt."""

    due_us: int
    attempt: int

    @classmethod
    def of(cls, job: windrow.Job) -> Fence:
        return cls((job.run_at - _EPOCH) // timedelta(microseconds=1), job.attempt)


class Orders:
    """The shop's own database. Any number of processes may use it."""

    def __init__(self, file: Path) -> None:
        # With autocommit, each statement below is a transaction. The handlers of a worker are threads that share this
        # connection.
        self._database = sqlite3.connect(file, isolation_level=None, timeout=30, check_same_thread=False)
        self._database.executescript("""
            PRAGMA journal_mode = WAL;
            CREATE TABLE IF NOT EXISTS purchase (
                id TEXT PRIMARY KEY, customer TEXT NOT NULL, cents INTEGER NOT NULL,
                state TEXT NOT NULL DEFAULT 'new',
                -- The fence of the newest lease of the payment's job that has written here.
                due_us INTEGER NOT NULL DEFAULT 0, attempt INTEGER NOT NULL DEFAULT 0
            ) STRICT;
            CREATE TABLE IF NOT EXISTS refused (purchase_id TEXT NOT NULL) STRICT;
        """)

    def add(self, order_id: str, customer: str, cents: int) -> None:
        self._database.execute(
            "INSERT OR IGNORE INTO purchase (id, customer, cents) VALUES (?, ?, ?)", (order_id, customer, cents)
        )

    def write(self, order_id: str, state: str, fence: Fence) -> bool:
        """Changes an order's state, unless the holder of a later lease has already changed it. Returns whether the
        state was changed.

        A later lease exists only after the earlier one has ended. So a late worker, for example on a machine that was
        frozen for a minute, changes nothing any more. The check needs no call to Windrow, and no clock."""
        changed = self._database.execute(
            "UPDATE purchase SET state = ?1, due_us = ?2, attempt = ?3 WHERE id = ?4 AND (due_us, attempt) <= (?2, ?3)",
            (state, *fence, order_id),
        )
        if not changed.rowcount:
            self._database.execute("INSERT INTO refused VALUES (?)", (order_id,))
        return changed.rowcount == 1

    def report(self) -> dict[str, Any]:
        states = dict(self._database.execute("SELECT state, count(*) FROM purchase GROUP BY state").fetchall())
        (cents,) = self._database.execute(
            "SELECT coalesce(sum(cents), 0) FROM purchase WHERE state = 'paid'"
        ).fetchone()
        (refused,) = self._database.execute("SELECT count(*) FROM refused").fetchone()
        return {"orders": states, "paid_cents": cents, "late_writes_refused": refused}


def place(client: windrow.SyncClient, orders: Orders, count: int) -> list[windrow.Enqueued]:
    """Places this many orders, each with a payment. May be repeated: an order is paid for once."""
    numbers = range(1, count + 1)
    jobs: list[windrow.NewJob] = []
    for number in numbers:
        order_id, customer, cents = f"order-{number}", f"customer-{number % 7}", 50 + number * 137 % CENTS_MAX
        orders.add(order_id, customer, cents)
        payload = {"order": order_id, "customer": customer, "cents": cents}
        # Use the order's id as the dedup key, because a producer that crashed places the same orders again.
        jobs.append(
            windrow.NewJob(QUEUE, KIND, payload, attributes={"customer": customer}, dedup_key=order_id, max_attempts=50)
        )
    return client.enqueue_many(jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description="The shop's orders.")
    parser.add_argument("--file", type=Path, default=Path("shop.db"), help="the shop's database; default: shop.db")
    commands = parser.add_subparsers(dest="command", required=True)
    placing = commands.add_parser("place", help="place orders")
    placing.add_argument("org")
    placing.add_argument("--orders", type=int, default=20, metavar="N", help="default: 20")
    commands.add_parser("report", help="tell what became of the orders")
    given = parser.parse_args()
    orders = Orders(given.file)
    if given.command == "report":
        print(json.dumps(orders.report()))
        return
    with windrow.SyncClient(org=given.org) as client:
        stored = place(client, orders, given.orders)
    known = sum(one.duplicate for one in stored)
    print(f"{len(stored) - known} payments are new, {known} were known")


if __name__ == "__main__":
    main()
