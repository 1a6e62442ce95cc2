"""Hears what is notified on one channel of a database.

A hint: what is said while nobody listens is lost, and so whoever listens is told when that may have been so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import psycopg

from shard.connection import Connection
from shard.database import hang_up

_log = logging.getLogger(__name__)

_RECONNECT_S = 1.0


class Listener:
    """`heard` is told each message; None: messages before this may have been missed."""

    def __init__(self, dsn: str, channel: str, heard: Callable[[str | None], None], *, application_name: str) -> None:
        self._application_name = application_name
        self._dsn = dsn
        self._channel = channel
        self._heard = heard
        self._connection: Connection | None = None

    def reconnect(self, dsn: str) -> None:
        """From now on hears by another DSN."""
        self._dsn = dsn
        self.hang_up()

    def hang_up(self) -> None:
        """Connects anew: the server that is listened to may say nothing any more."""
        if self._connection is not None:
            hang_up(self._connection)

    async def run(self) -> None:
        """Listens until cancelled."""
        while True:
            dsn = self._dsn
            try:
                connection = await Connection.connect(
                    dsn,
                    autocommit=True,
                    application_name=self._application_name,
                    client_encoding="utf8",
                    connect_timeout=5,
                    # As for the pool's connections: a silent network is a dead one after ten seconds.
                    keepalives_idle=5,
                    keepalives_interval=2,
                    keepalives_count=3,
                )
                async with connection:
                    self._connection = connection
                    # While it was made, nobody could hang up on it.
                    if dsn == self._dsn:
                        await connection.listen(self._channel, self._heard)
            except psycopg.Error as error:
                # Databases that are away are spoken of by their pools.
                _log.debug("does not hear %s: %s", self._channel, error)
            except Exception:  # noqa: BLE001 - a hint less must not end this process
                _log.exception("does not hear %s", self._channel)
            self._connection = None
            await asyncio.sleep(_RECONNECT_S)
