"""Writes rows to the shop's database, many in one transaction. Any number of indexers may run.

python -m examples.importer.indexer shop --file products.db
"""

from __future__ import annotations

import argparse
import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import windrow
from examples.importer.feeds import ROWS

BATCH = 200


class Products:
    """The shop's own database."""

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, timeout=30, check_same_thread=False)
        # Several batches may be written at a time, each in a thread.
        self._lock = threading.Lock()
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS product (sku TEXT PRIMARY KEY, cents INTEGER NOT NULL) STRICT"
        )

    def put(self, rows: Sequence[tuple[str, int]]) -> None:
        """Writes products in one transaction. A row that is written again changes nothing, so a batch may be
        repeated."""
        with self._lock, self._database:
            self._database.executemany("INSERT OR REPLACE INTO product VALUES (?, ?)", rows)

    def count(self) -> int:
        with self._lock:
            (count,) = self._database.execute("SELECT count(*) FROM product").fetchone()
        return int(count)


def make_worker(org: str, products: Products, *, window_s: float) -> windrow.Worker:
    # The worker may have the jobs of four batches, so that jobs for the next batches are collected while a batch runs.
    worker = windrow.Worker(windrow.Client(org=org), ROWS, concurrency=4 * BATCH, visibility_window=window_s)

    @worker.batch_handler("index_row", max_jobs=BATCH, max_wait=0.05)
    def index_rows(jobs: Sequence[windrow.Job]) -> list[windrow.Kill | None]:
        rows = [job.json() for job in jobs]
        products.put([(row["sku"], row["cents"]) for row in rows if row["cents"] >= 0])
        # Return one outcome for each job: a broken row must not fail the other rows, and must not be tried again.
        return [windrow.Kill(f"no price: {row['cents']}") if row["cents"] < 0 else None for row in rows]

    return worker


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes rows to the shop's database.")
    parser.add_argument("org")
    parser.add_argument("--file", type=Path, default=Path("products.db"), help="default: products.db")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="the visibility window; default: 30")
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    windrow.run(make_worker(given.org, Products(given.file), window_s=given.window))


if __name__ == "__main__":
    main()
