"""Tells the other routers of a shard that queues may have new work, and hears them say so.

A hint (I7): a ring that is lost costs waiting consumers a sweep's interval, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection

import psycopg

from shard import statements
from shard.database import Database, hang_up
from shard.errors import ShardUnavailable
from shard.vocabulary import QueueId

_log = logging.getLogger(__name__)

# At most one ring in so long; what came meanwhile goes with the next.
_PAUSE_S = 0.010
_RECONNECT_S = 1.0
# A notification holds less than 8,000 bytes.
_QUEUES_MAX = 390
_ALL = "*"


class Doorbell:
    """`heard` is told the queues that another router rang for; None: any may have work."""

    def __init__(self, database: Database, dsn: str, heard: Callable[[Collection[QueueId] | None], None]) -> None:
        self._database = database
        self._dsn = dsn
        self._heard = heard
        self._me = secrets.token_hex(8)
        self._listening: psycopg.AsyncConnection | None = None
        self._due: set[QueueId] = set()
        self._rung = asyncio.Event()

    def ring(self, queues: Collection[QueueId]) -> None:
        """Has the other routers told, soon. For work that has been committed."""
        if not queues:
            return
        self._due.update(queues)
        self._rung.set()

    def reconnect(self, dsn: str) -> None:
        """From now on hears by another DSN."""
        self._dsn = dsn
        if self._listening is not None:
            hang_up(self._listening)

    async def run(self) -> None:
        """Rings and listens until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ring())
            group.create_task(self._listen())

    async def _ring(self) -> None:
        while True:
            await self._rung.wait()
            self._rung.clear()
            queues, self._due = self._due, set()
            named = ",".join(map(str, queues)) if len(queues) <= _QUEUES_MAX else _ALL
            try:
                await self._database.run(statements.RING, {"message": f"{self._me} {named}"})
            except (ShardUnavailable, psycopg.Error) as error:
                _log.debug("could not ring: %s", error)
            except Exception:  # noqa: BLE001 - a hint less must not end this router
                _log.exception("could not ring")
            await asyncio.sleep(_PAUSE_S)

    async def _listen(self) -> None:
        while True:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    self._dsn,
                    autocommit=True,
                    application_name="windrow doorbell",
                    client_encoding="utf8",
                    connect_timeout=5,
                    # As for the pool's connections: a silent network is a dead one after ten seconds.
                    keepalives_idle=5,
                    keepalives_interval=2,
                    keepalives_count=3,
                )
                async with connection:
                    self._listening = connection
                    await connection.execute("LISTEN windrow_work")
                    # Whatever was rung before is not heard any more.
                    self._heard(None)
                    async for notification in connection.notifies():
                        self._hear(notification.payload)
            except psycopg.Error as error:
                # Shards that are away are spoken of by their pools.
                _log.debug("does not hear the doorbell: %s", error)
            except Exception:  # noqa: BLE001 - a hint less must not end this router
                _log.exception("does not hear the doorbell")
            self._listening = None
            await asyncio.sleep(_RECONNECT_S)

    def _hear(self, message: str) -> None:
        who, _, named = message.partition(" ")
        if who == self._me:
            return
        try:
            self._heard(None if named == _ALL else [QueueId(int(number)) for number in named.split(",")])
        except ValueError:
            _log.warning("somebody who is no router rang: %.100r", message)
