"""Receives events by HTTP, and enqueues the delivery of each event.

python -m examples.webhooks.api --port 8080

`POST /ORG/events` with {"id": "evt_1", "endpoint": "http://…", "data": {…}} answers 202 with the id of the delivery's
job, and whether the event was known. After the 202 the delivery survives a crash of any process.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import windrow

QUEUE = "webhooks"
KIND = "deliver"
# How many deliveries to one endpoint may run at the same time. The limit keeps a slow endpoint from using all handlers
# of the workers.
AT_ONCE = 2
MAX_ATTEMPTS = 12
# For how long an event is recognised.
KNOWN_DAYS = 7
_BODY_MAX = 256 * 1024


class Deliveries:
    """Enqueues deliveries for any org. `retry_s`: the delay before the second attempt. The delay doubles after each
    attempt, up to an hour."""

    def __init__(self, *, retry_s: float) -> None:
        self._retry = windrow.ExponentialRetry(initial_delay=retry_s, multiplier=2, max_delay=3600, jitter=0.2)
        self._clients: dict[str, windrow.SyncClient] = {}

    def add(self, org: str, event: dict[str, Any]) -> windrow.Enqueued:
        """Stores the delivery of an event. Returns after the commit. Raises windrow.WindrowError."""
        endpoint = str(event["endpoint"])
        return self._client(org).enqueue(
            QUEUE,
            KIND,
            event,
            attributes={"endpoint": endpoint},
            group=endpoint,
            max_attempts=MAX_ATTEMPTS,
            retry=self._retry,
            # The same event may go to several endpoints.
            dedup_key=f"{event['id']} {endpoint}",
            dedup_window=KNOWN_DAYS * 86_400,
        )

    def _client(self, org: str) -> windrow.SyncClient:
        client = self._clients.get(org)
        if client is None:
            client = self._clients.setdefault(org, windrow.SyncClient(org=org))
            client.put_queue(QUEUE, group_concurrency=AT_ONCE)
        return client


def _event(body: bytes) -> dict[str, Any]:
    event: Any = json.loads(body)
    if not isinstance(event, dict) or not {"id", "endpoint"} <= event.keys():
        raise ValueError("an event has an id and an endpoint")
    return cast("dict[str, Any]", event)


class _Handler(BaseHTTPRequestHandler):
    deliveries: Deliveries

    def do_POST(self) -> None:
        _, _, path = self.path.partition("/")
        org, _, what = path.partition("/")
        length = int(self.headers.get("Content-Length") or 0)
        if what != "events":
            self._answer(404, {"error": "POST to /ORG/events"})
            return
        if length > _BODY_MAX:
            self._answer(413, {"error": f"an event may have {_BODY_MAX} bytes"})
            return
        try:
            stored = self.deliveries.add(org, _event(self.rfile.read(length)))
        except (ValueError, windrow.InvalidRequest) as error:
            self._answer(400, {"error": str(error)})
        except windrow.WindrowError as error:
            # The sender will send the event again. Even if this call has stored the delivery, it is stored only once.
            self._answer(503, {"error": str(error)})
        else:
            self._answer(202, {"delivery": stored.id, "duplicate": stored.duplicate})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Does not log each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes events by HTTP, and enqueues the delivery of each.")
    parser.add_argument("--port", type=int, default=8080, help="default: 8080; 0: any free one")
    parser.add_argument("--retry", type=float, default=1.0, metavar="S", help="before the second attempt; default: 1")
    given = parser.parse_args()
    _Handler.deliveries = Deliveries(retry_s=given.retry)
    server = ThreadingHTTPServer(("127.0.0.1", given.port), _Handler)
    print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
