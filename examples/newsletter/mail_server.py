"""A mail server for trials. It accepts up to --rate messages in a second, and refuses further messages with status 429.

python -m examples.newsletter.mail_server --port 9200 --rate 50

`POST /messages` with an Idempotency-Key sends a message once. `GET /` shows how many messages were sent and refused.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Mails:
    def __init__(self, rate: int) -> None:
        self._lock = threading.Lock()
        self._rate = rate
        # The times at which the messages of the last second came.
        self._latest = deque[float]()
        self._keys = set[str]()
        self._refused = 0

    def send(self, key: str) -> bool:
        """Sends a message, unless it was sent before. Returns False if there are too many messages in this second."""
        now = time.monotonic()
        with self._lock:
            while self._latest and self._latest[0] <= now - 1:
                self._latest.popleft()
            if len(self._latest) >= self._rate:
                self._refused += 1
                return False
            self._latest.append(now)
            self._keys.add(key)
            return True

    def totals(self) -> dict[str, int]:
        with self._lock:
            return {"sent": len(self._keys), "refused": self._refused}


class _Handler(BaseHTTPRequestHandler):
    mails: Mails

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.mails.send(self.headers["Idempotency-Key"]):
            self._answer(202, b"{}")
        else:
            self._answer(429, b"{}")

    def do_GET(self) -> None:
        self._answer(200, json.dumps(self.mails.totals()).encode())

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Does not log each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A mail server for trials.")
    parser.add_argument("--port", type=int, default=9200, help="default: 9200; 0: any free one")
    parser.add_argument("--rate", type=int, default=50, metavar="N", help="messages in a second; default: 50")
    given = parser.parse_args()
    _Handler.mails = Mails(given.rate)
    server = ThreadingHTTPServer(("127.0.0.1", given.port), _Handler)
    server.daemon_threads = True
    print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
