"""Graceful stops by SIGTERM and SIGINT. Owns both signal handlers while a service runs, then restores the old ones."""

from __future__ import annotations

import asyncio
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
_stops: list[Callable[[], None]] = []
_before: dict[signal.Signals, Any] = {}


def run(*services: Service) -> None:
    """Runs workers and relays from a script until SIGTERM or Ctrl-C, then closes their clients.

    The first signal stops them gracefully, the second at once. A `def` handler that still runs in its thread keeps the
    process alive until it ends or another signal comes. Several services share one fate: if a service raises, for
    example because its key was revoked, the others are cancelled, and the error is raised in an ExceptionGroup. If
    services of different orgs must not end each other, run each in a process of its own.
    """
    asyncio.run(_run_all(services))


async def _run_all(services: tuple[Service, ...]) -> None:
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
def stopped_by_signals(stop: Callable[[], None]) -> Generator[None]:
    """Calls `stop` on each signal. Does nothing outside the main thread, or if the event loop has no signal support."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    if not _stops:
        try:
            for number in _SIGNALS:
                _before[number] = signal.getsignal(number)
                loop.add_signal_handler(number, _stop_all)
        except NotImplementedError:
            yield
            return
    _stops.append(stop)
    try:
        yield
    finally:
        _stops.remove(stop)
        # The last service to end restores the handlers, in whatever order they started.
        if not _stops:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, _before.pop(number) or signal.SIG_DFL)


def _stop_all() -> None:
    for stop in tuple(_stops):
        stop()
