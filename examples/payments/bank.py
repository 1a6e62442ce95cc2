"""A bank for trials. It takes money from accounts, once for each key. You may kill it at any moment.

python -m examples.payments.bank --port 9100 --file bank.db

`POST /charges` with {"customer": "ada", "cents": 500} and an Idempotency-Key answers whether the money was taken. If
the bank knows the key, it gives the same answer as before. `POST /hold` makes charges wait until `POST /resume`. A call
of `GET /` shows the money that was taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# The money that each customer has at the beginning.
BALANCE_CENTS = 5_000


class Accounts:
    def __init__(self, file: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._database.executescript("""
            CREATE TABLE IF NOT EXISTS account (customer TEXT PRIMARY KEY, cents INTEGER NOT NULL) STRICT;
            CREATE TABLE IF NOT EXISTS charge
                (key TEXT PRIMARY KEY, customer TEXT NOT NULL, cents INTEGER NOT NULL, taken INTEGER NOT NULL) STRICT;
        """)

    def charge(self, key: str, customer: str, cents: int) -> bool:
        """Takes the money, unless the account has too little. Stores the key and takes the money in one transaction:
        after a crash, both were done or neither. A key that was used before gets the same answer again, and no money is
        taken."""
        with self._lock, self._transaction():
            known = self._database.execute("SELECT taken FROM charge WHERE key = ?", (key,)).fetchone()
            if known is not None:
                return bool(known[0])
            self._database.execute("INSERT OR IGNORE INTO account VALUES (?, ?)", (customer, BALANCE_CENTS))
            changed = self._database.execute(
                "UPDATE account SET cents = cents - ?1 WHERE customer = ?2 AND cents >= ?1", (cents, customer)
            )
            taken = changed.rowcount == 1
            self._database.execute("INSERT INTO charge VALUES (?, ?, ?, ?)", (key, customer, cents, taken))
            return taken

    def totals(self) -> dict[str, int]:
        with self._lock:
            charges, taken, cents = self._database.execute(
                "SELECT count(*), coalesce(sum(taken), 0), coalesce(sum(taken * cents), 0) FROM charge"
            ).fetchone()
            (missing,) = self._database.execute("SELECT coalesce(sum(? - cents), 0) FROM account", (BALANCE_CENTS,))
            return {"charges": charges, "taken": taken, "cents": cents, "missing_cents": missing[0]}

    @contextlib.contextmanager
    def _transaction(self) -> Any:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


class _Handler(BaseHTTPRequestHandler):
    accounts: Accounts
    open: threading.Event
    # The threads whose charges wait.
    waiting: set[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match self.path:
            case "/hold":
                self.open.clear()
                self._answer({"holds": True})
            case "/resume":
                self.open.set()
                self._answer({"holds": False})
            case _:
                self.waiting.add(threading.get_ident())
                self.open.wait()
                self.waiting.discard(threading.get_ident())
                asked = json.loads(body)
                key = self.headers["Idempotency-Key"]
                self._answer({"taken": self.accounts.charge(key, asked["customer"], asked["cents"])})

    def do_GET(self) -> None:
        self._answer(self.accounts.totals() | {"waiting": len(self.waiting)})

    def _answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Does not log each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A bank for trials.")
    parser.add_argument("--port", type=int, default=9100, help="default: 9100; 0: any free one")
    parser.add_argument("--file", type=Path, default=Path("bank.db"), help="its database; default: bank.db")
    given = parser.parse_args()
    _Handler.accounts, _Handler.open, _Handler.waiting = Accounts(given.file), threading.Event(), set()
    _Handler.open.set()
    server = ThreadingHTTPServer(("127.0.0.1", given.port), _Handler)
    server.daemon_threads = True
    print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
