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
from shard.database import Database
from shard.errors import ShardUnavailable
from shard.listening import Listener
from shard.vocabulary import QueueId

_log = logging.getLogger(__name__)

# At most one ring in so long; what came meanwhile goes with the next. One that many asked for is followed by a longer
# pause: to ring, and to wake all who hear it, costs a busy server as much as a statement.
_PAUSE_S = 0.010
_PAUSE_S_MAX = 0.040
# A notification holds less than 8,000 bytes.
_QUEUES_MAX = 390
_ALL = "*"
# In the place of a router's name: a migration was run (record_migration.sql).
_MIGRATION = "migration"
# Before the queues' numbers: jobs have come from another shard, and may have been due long since.
_ARRIVED = "+"


class Doorbell:
    """`heard` is told the queues that another router rang for; None: any may have work. `arrived` is told the queues to
    which jobs have come from another shard. `migrated` is called after a migration, and when one may have been missed.
    """

    def __init__(
        self,
        database: Database,
        dsn: str,
        heard: Callable[[Collection[QueueId] | None], None],
        arrived: Callable[[Collection[QueueId]], None],
        migrated: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._heard = heard
        self._arrived = arrived
        self._migrated = migrated
        self._listener = Listener(dsn, "windrow_work", self._hear, application_name="windrow doorbell")
        database.went_away = self._listener.hang_up
        self._me = secrets.token_hex(8)
        self._due: set[QueueId] = set()
        self._asked = 0
        self._rung = asyncio.Event()

    def ring(self, queues: Collection[QueueId]) -> None:
        """Has the other routers told, soon. For work that has been committed."""
        if not queues:
            return
        self._due.update(queues)
        self._asked += 1
        self._rung.set()

    def reconnect(self, dsn: str) -> None:
        """From now on hears by another DSN."""
        self._listener.reconnect(dsn)

    async def run(self) -> None:
        """Rings and listens until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ring())
            group.create_task(self._listener.run())

    async def _ring(self) -> None:
        while True:
            await self._rung.wait()
            self._rung.clear()
            queues, self._due = self._due, set()
            asked, self._asked = self._asked, 0
            named = ",".join(map(str, queues)) if len(queues) <= _QUEUES_MAX else _ALL
            try:
                await self._database.run(statements.RING, {"message": f"{self._me} {named}"})
            except (ShardUnavailable, psycopg.Error) as error:
                _log.debug("could not ring: %s", error)
            except Exception:  # noqa: BLE001 - a hint less must not end this router
                _log.exception("could not ring")
            await asyncio.sleep(min(asked * _PAUSE_S, _PAUSE_S_MAX))

    def _hear(self, message: str | None) -> None:
        if message is None:
            self._heard(None)
            self._migrated()
            return
        who, _, named = message.partition(" ")
        if who == _MIGRATION:
            self._migrated()
        if who == self._me:
            return
        try:
            if named.startswith(_ARRIVED):
                self._arrived(_numbers(named.removeprefix(_ARRIVED)))
            else:
                self._heard(None if named == _ALL else _numbers(named))
        except ValueError:
            _log.warning("somebody who is no router rang: %.100r", message)


def _numbers(named: str) -> list[QueueId]:
    return [QueueId(int(number)) for number in named.split(",")]
