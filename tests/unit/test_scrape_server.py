"""The HTTP server of the scrape endpoint, when it is attacked by clients that can reach its address."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from collections.abc import Generator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from router.process import scrape_server
from router.process.scrape_server import CONNECTIONS_MAX
from tests.routers import PATIENCE_S


@pytest.fixture
def port() -> Generator[int, None, None]:
    """Yields the port of a server with one metric."""
    registry = CollectorRegistry()
    Gauge("windrow_test", "A figure.", registry=registry).set(7)
    server, thread = scrape_server.start("127.0.0.1", 0, registry)
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_beyond_its_connections_the_server_closes_the_oldest_and_answers_a_scrape(port: int) -> None:
    with contextlib.ExitStack() as stack:
        half_requests: list[socket.socket] = []
        for _ in range(CONNECTIONS_MAX + 20):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            half_requests.append(connection)
        for oldest in half_requests[:20]:
            # The answer to half a request does not matter, but the connection must end.
            with contextlib.suppress(ConnectionError):
                while oldest.recv(65_536):
                    pass
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            assert b"windrow_test 7.0" in answer.read()


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX: "])
def test_a_connection_that_says_nothing_more_is_closed_and_leaves_nothing_in_the_log(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scrape_server._Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""
    assert capfd.readouterr() == ("", "")
