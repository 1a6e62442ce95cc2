"""Listens to the notifications on one channel of a database.

Notifications are hints: a notification is lost if it is sent while no connection listens. The listener therefore
reports when notifications may have been missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import psycopg

from shard.postgres.connection import CONNECT_OPTIONS, Connection, hang_up

_log = logging.getLogger(__name__)

_RECONNECT_S = 1.0


class Listener:
    """`on_message` is called with each message, and with None when earlier messages may have been missed."""

    def __init__(
        self, dsn: str, channel: str, on_message: Callable[[str | None], None], *, application_name: str
    ) -> None:
        self._application_name = application_name
        self._dsn = dsn
        self._channel = channel
        self._on_message = on_message
        self._connection: Connection | None = None

    def reconnect(self, dsn: str) -> None:
        """Makes the listener use another DSN from now on."""
        self._dsn = dsn
        self.hang_up()

    def hang_up(self) -> None:
        """Breaks the connection, so that a new connection is made. Call it if the server may not answer any more."""
        if self._connection is not None:
            hang_up(self._connection)

    async def run(self) -> None:
        """Listens until cancelled."""
        while True:
            dsn = self._dsn
            try:
                connection = await Connection.connect(dsn, application_name=self._application_name, **CONNECT_OPTIONS)
                async with connection:
                    self._connection = connection
                    # `reconnect` cannot break a connection that is still being made, so compare the DSNs.
                    if dsn == self._dsn:
                        await connection.listen(self._channel, self._on_message)
            except psycopg.Error as error:
                # The level is only debug, because the pool logs that its database is unavailable.
                _log.debug("cannot listen on %s: %s", self._channel, error)
            except Exception:  # noqa: BLE001 - a lost hint must not end this process
                _log.exception("cannot listen on %s", self._channel)
            self._connection = None
            await asyncio.sleep(_RECONNECT_S)
