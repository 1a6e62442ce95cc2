"""Graceful stops by SIGTERM and SIGINT. Sets both signal handlers while a service runs, and then restores the old
handlers."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from windrow.client import Client


class Service(Protocol):
    """A Worker or an outbox.Relay."""

    @property
    def client(self) -> Client: ...
    async def run(self) -> None: ...
    def stop(self) -> None: ...


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger("windrow.worker")
_stops: list[Callable[[], None]] = []
# For each signal that this module handles now, the handler that the signal had before.
_before: dict[signal.Signals, Any] = {}
# How many signals have arrived since this module set its signal handlers.
_count = 0


def run(*services: Service) -> None:
    """Runs workers and relays from a script until SIGTERM or Ctrl-C, then closes their clients.

    The first signal stops the services gracefully, and the second signal stops them at once. A third signal does what
    it would do without this function, which is usually to end the process. A `def` handler that still runs in its
    thread keeps the process alive until the handler ends or another signal comes. Several services end together: if one
    service raises an error, for example because its key was revoked, the other services are cancelled, and the error is
    raised in an ExceptionGroup. If services of different orgs must not end each other, run each in a process of its
    own.
    """
    asyncio.run(_run_all(services))


async def _run_all(services: tuple[Service, ...]) -> None:
    # The services add their own stop() when they run.
    with stopped_by_signals(lambda: None, always=True):
        try:
            if len(services) == 1:
                await services[0].run()
                return
            async with asyncio.TaskGroup() as group:
                for service in services:
                    group.create_task(service.run())
        finally:
            for client in {id(service.client): service.client for service in services}.values():
                await client.close()


@contextmanager
def stopped_by_signals(stop: Callable[[], None], *, always: bool = False) -> Generator[None]:
    """Calls `stop` on the first two signals. Does nothing outside the main thread, or if the event loop has no signal
    support. Also does nothing if the program handles SIGTERM itself, as a web server does, unless `always` is true. If
    this function replaced the signal handlers of a web server, the server would not end, and a handler that the server
    had set in the event loop could not be restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _stops:
        if not always and callable(signal.getsignal(signal.SIGTERM)):
            _log.info("the program handles SIGTERM itself, so signals do not stop its workers and relays")
            yield
            return
        try:
            _take()
        except NotImplementedError:
            yield
            return
    _stops.append(stop)
    try:
        yield
    finally:
        _stops.remove(stop)
        # The last service to end restores the handlers, no matter in which order the services started.
        if not _stops:
            _restore()


def _take() -> None:
    global _count
    _count = 0
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        before = signal.getsignal(number)
        loop.add_signal_handler(number, _on_signal)
        _before[number] = before


def _restore() -> None:
    loop = asyncio.get_running_loop()
    while _before:
        number, before = _before.popitem()
        loop.remove_signal_handler(number)
        signal.signal(number, before or signal.SIG_DFL)


def _on_signal() -> None:
    global _count
    _count += 1
    for stop in tuple(_stops):
        stop()
    if _count == 2:
        # A job's handler that was cancelled may still not end, and keep the process alive. So let the next signal end
        # the process.
        _restore()
