"""A receiver for trials: it fails sometimes, hangs sometimes, and applies each event once.

python -m examples.webhooks.receiver --port 9000 --fail 0.2 --hang 0.05

`POST /gone…` answers 410 until somebody sends `POST /repair`. `GET /` shows what came and what took effect.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Effects:
    """The effects of the requests. A real receiver stores the key of an event in its database, in the same transaction
    as the effect."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys = set[tuple[str, str]]()
        self._requests = 0
        self.repaired = threading.Event()

    def apply(self, path: str, key: str) -> bool:
        """Applies an event. Returns False if it was applied before."""
        with self._lock:
            self._requests += 1
            is_new = (path, key) not in self._keys
            self._keys.add((path, key))
            return is_new

    def as_json(self) -> dict[str, Any]:
        with self._lock:
            return {"requests": self._requests, "effects": len(self._keys)}


class _Handler(BaseHTTPRequestHandler):
    effects: Effects
    fail: float
    hang: float
    ended: threading.Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/repair":
            self.effects.repaired.set()
            self._answer(200, {"repaired": True})
            return
        if self.path.startswith("/gone") and not self.effects.repaired.is_set():
            self._answer(410, {"error": "gone"})
            return
        if random.random() < self.fail:
            self._answer(500, {"error": "bad luck"})
            return
        is_new = self.effects.apply(self.path, self.headers.get("Idempotency-Key", ""))
        if random.random() < self.hang:
            # The event took effect, but the sender is not told so.
            self.ended.wait(60)
            return
        self._answer(200, {"new": is_new})

    def do_GET(self) -> None:
        self._answer(200, self.effects.as_json())

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Does not log each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A receiver that fails sometimes and hangs sometimes.")
    parser.add_argument("--port", type=int, default=9000, help="default: 9000; 0: any free one")
    parser.add_argument("--fail", type=float, default=0.2, metavar="SHARE", help="of the requests; default: 0.2")
    parser.add_argument("--hang", type=float, default=0.05, metavar="SHARE", help="of the requests; default: 0.05")
    given = parser.parse_args()
    _Handler.effects, _Handler.ended = Effects(), threading.Event()
    _Handler.fail, _Handler.hang = given.fail, given.hang
    server = ThreadingHTTPServer(("127.0.0.1", given.port), _Handler)
    server.daemon_threads = True
    print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
