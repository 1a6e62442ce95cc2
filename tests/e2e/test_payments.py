"""The payments example under faults, and the commands of its page."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from subprocess import Popen

import psutil

from examples.payments.shop import Fence, Orders
from examples.payments.worker import CONCURRENCY
from tests.e2e.conftest import RunningCluster
from tests.e2e.programs import Page, call
from tests.routers import reserved_address, until
from windrow import SyncClient, uuid7

ORDERS = 40


def _stopped_outside_of_writes(worker: Popen[str], database: Path) -> bool:
    """Stops the worker. If the worker has the write lock of the database, lets the worker continue and returns False,
    because no other process could write while the worker is stopped. The worker may write even if all its handlers
    waited for the bank a moment before. On a busy machine a lease of one second can end, and then a handler begins
    another job."""
    worker.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED, "it stands still")
    with closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as own:
        try:
            own.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            worker.send_signal(signal.SIGCONT)
            return False
    return True


def test_each_order_is_paid_for_once_though_workers_stop_and_the_bank_and_the_router_are_killed(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    org = f"shop-{uuid7()}"
    with ExitStack() as programs, reserved_address() as address, SyncClient(cluster.address, org=org) as client:
        bank = f"http://{address}"
        page = Page(
            "payments",
            cluster,
            {
                "shop": org,
                "9100": address.rpartition(":")[2],
                "http://127.0.0.1:9100": bank,
                "bank.db": str(tmp_path / "bank.db"),
                "shop.db": str(tmp_path / "shop.db"),
            },
        )

        assert "40 payments are new, 0 were known" in page.run("place", "--orders", str(ORDERS))
        assert "0 payments are new, 40 were known" in page.run("place", "--orders", str(ORDERS))

        # Three attempts of one payment fail. The payment is dead and then redriven, so its attempts begin at 1 again.
        orders = Orders(tmp_path / "shop.db")
        client.alter_jobs([client.list_jobs("payments").jobs[0].id], priority=1)
        for number in range(1, 4):
            (job,) = client.dequeue("payments", worker="by hand")
            assert job.attempt == number
            assert orders.write(job.json()["order"], "charging", Fence.of(job))
            client.nack(job, retry_after=None if number == 3 else 0, permanent=number == 3)
        assert client.redrive_queue("payments") == 1

        late, _ = programs.enter_context(page.started("payments.worker", "--window", "1"))
        until(lambda: client.stats("payments").queues["payments"].scheduled, "no answer of the bank")
        first_bank, _ = programs.enter_context(page.started("payments.bank", listens=True))
        call(f"{bank}/hold", {})
        until(lambda: call(bank)["waiting"] == CONCURRENCY, "charges are under way")
        until(lambda: _stopped_outside_of_writes(late, tmp_path / "shop.db"), "the worker is stopped")
        call(f"{bank}/resume", {})

        doomed, _ = programs.enter_context(page.started("payments.worker", "--window", "1"))
        until(lambda: call(bank)["taken"] >= ORDERS // 4, "orders are paid")
        doomed.send_signal(signal.SIGKILL)
        first_bank.send_signal(signal.SIGKILL)
        first_bank.wait()
        cluster.kill()
        cluster.start()

        programs.enter_context(page.started("payments.bank", listens=True))
        programs.enter_context(page.started("payments.worker", "--window", "1"))
        until(
            lambda: client.stats("payments", include_finished=True).queues["payments"].succeeded == ORDERS,
            "every payment is decided",
        )
        # The stopped worker has the bank's answers, and continues.
        late.send_signal(signal.SIGCONT)
        until(lambda: orders.report()["late_writes_refused"], "a late write is refused")

        found, taken = json.loads(page.run("report")), call(bank)
        assert found["orders"].keys() <= {"paid", "declined"}
        assert sum(found["orders"].values()) == taken["charges"] == ORDERS
        assert found["orders"]["declined"] > 0
        assert found["orders"]["paid"] == taken["taken"]
        assert found["paid_cents"] == taken["cents"] == taken["missing_cents"]
        page.run_the_others()
