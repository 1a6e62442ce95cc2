"""The HTTP server of the scrape endpoint, before strangers who reach its address."""

from __future__ import annotations

import contextlib
import socket
import urllib.request

from prometheus_client import CollectorRegistry, Gauge

from router.process import scrape_server
from router.process.scrape_server import CONNECTIONS_MAX
from tests.routers import PATIENCE_S


def test_beyond_its_connections_the_server_closes_the_oldest_and_answers_a_scrape() -> None:
    registry = CollectorRegistry()
    Gauge("windrow_test", "A figure.", registry=registry).set(7)
    server, thread = scrape_server.start("127.0.0.1", 0, registry)
    address = ("127.0.0.1", server.server_port)
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        half_requests: list[socket.socket] = []
        for _ in range(CONNECTIONS_MAX + 20):
            connection = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            half_requests.append(connection)
        for oldest in half_requests[:20]:
            # What it answers to the half of a request does not matter; then the connection ends.
            with contextlib.suppress(ConnectionError):
                while oldest.recv(65_536):
                    pass
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            assert b"windrow_test 7.0" in answer.read()
