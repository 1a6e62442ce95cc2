"""The HTTP server of the scrape endpoint. It serves only a few connections at a time. Whoever reaches the address can
open any number of connections. Each connection takes a thread and a file descriptor of the supervisor, which must still
be able to start router processes."""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

# The number of connections that are served at a time. If one more comes, the oldest is closed, so that a
# scrape is served even if all other connections are silent.
CONNECTIONS_MAX = 16
# How long the server waits for the next bytes of a request, and for the client to take the next bytes of an answer.
_SILENCE_S = 10.0


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the library
        """Logs nothing: a stranger could fill the log."""


class _Server(ThreadingWSGIServer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        # The connections that are served, the oldest first.
        self._open: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.append(request)
            if len(self._open) > CONNECTIONS_MAX:
                # Only shut the connection down, because the thread that serves it also closes it.
                _end(self._open.pop(0))
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        with self._lock:
            if request in self._open:
                self._open.remove(request)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing if a connection broke or said nothing for too long: a stranger could fill the log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def start(host: str, port: int, registry: CollectorRegistry) -> tuple[_Server, threading.Thread]:
    """Serves the registry in a thread. Returns the server, whose `shutdown` ends that thread. Raises OSError."""
    family, _, _, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class ServerOfFamily(_Server):
        address_family = family

    server: _Server = make_server(host, port, make_wsgi_app(registry), ServerOfFamily, handler_class=_Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    return server, thread


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # The peer has left.
        return
