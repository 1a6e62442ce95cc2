"""The doorbell: notifies the other routers of a shard, and listens to their notifications. The notifications say that
queues may have new jobs, that leases have ended, that a router awaits the ends of some jobs, and that awaited jobs may
have ended. Router processes of one supervisor also tell each other directly (router/fleet/siblings).

Notifications are hints (invariant I7), and may be lost. If one is lost, waiting consumers get the jobs only at the next
sweep, or a consumer learns only from the answer to its next extend that its lease has ended. A router that awaits the
end of a job also looks at the job from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Sequence

import psycopg

from shard.errors import ShardUnavailable
from shard.postgres import arrays
from shard.postgres.listener import Listener
from shard.postgres.pool import Database
from shard.queue import revocation, statements
from shard.queue.revocation import Revocation
from shard.vocabulary import QueueId
from shard.workflow import WorkflowId

_log = logging.getLogger(__name__)

# The pause after a notification. Queues that are added during the pause are sent in the next notification. The pause is
# longer if more calls share a notification. Pauses save notifications. Each notification costs a busy server as much as
# a statement, because the server also wakes all listeners.
_PAUSE_S = 0.010
_PAUSE_S_MAX = 0.040
# Upper bound for the queues in one notification, whose payload must be shorter than 8,000 bytes.
_QUEUES_MAX = 390
_ALL = "*"
# Sent instead of a router's name: a migration was run (record_migration.sql).
_MIGRATION = "migration"
# Sent before the queue ids: jobs have arrived from another shard, and may have become due a long time ago.
_ARRIVED = "+"
# Sent before revocations.
_REVOKED = "-"
# Sent before the ids of jobs whose ends this router awaits, and of jobs that may have ended.
_AWAITED = "?"
_ENDED = "!"
# Sent as the first of the queue ids: leases of these queues have ended. No queue has this id.
_LEASE_ENDED = QueueId(0)
# Sent alone: a schedule may be due earlier than before.
_SCHEDULES = "@"
# Sent instead of a router's name: workflows follow in which work of a fold remains (functions/fold_workflows.sql).
_FOLD = "fold"
# Sent alone: kinds were quarantined or released.
_QUARANTINES = "#"
# How many ids of jobs fit into one notification, and how many may wait to be sent. If that many wait, more ids are
# dropped.
_IDS_MAX = 230
_IDS_WAITING_MAX = 10_000
# Upper bound for the leases in revocations that wait to be sent. If that many wait, more revocations are dropped.
_REVOKED_LEASES_MAX = 10_000


class Doorbell:
    """Rings and listens on one shard. `on_ring` is called with the queues for which another router rang; None means
    that any queue may have jobs. If leases of these queues have ended, `on_lease_ended` is called before `on_ring`.
    `on_arrival` is called with the queues in which jobs arrived from another shard, and `on_revoked` with leases that
    ended at another router. `on_awaited` is called with the jobs (as 32 hexadecimal digits) whose ends another router
    awaits, and `on_ended` with awaited jobs that may have ended there. `on_schedules` is called when a schedule was
    changed at another router, and `on_quarantines` when kinds were quarantined or released there. `on_schedules` and
    `on_quarantines` are also called when notifications may have been missed. `on_fold_left` is called with workflows
    (the org's number and the workflow's id) for which a fold of any router, including this router, has left work.
    `on_migration` is called after a migration, and when notifications may have been missed."""

    def __init__(
        self,
        database: Database,
        dsn: str,
        on_ring: Callable[[Collection[QueueId] | None], None],
        on_arrival: Callable[[Collection[QueueId]], None],
        on_revoked: Callable[[Sequence[Revocation]], None] = lambda _: None,
        on_migration: Callable[[], None] = lambda: None,
        on_awaited: Callable[[Collection[str]], None] = lambda _: None,
        on_ended: Callable[[Collection[str]], None] = lambda _: None,
        on_schedules: Callable[[], None] = lambda: None,
        on_lease_ended: Callable[[Collection[QueueId] | None], None] = lambda _: None,
        on_fold_left: Callable[[Collection[tuple[int, WorkflowId]]], None] = lambda _: None,
        on_quarantines: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._on_ring = on_ring
        self._on_lease_ended = on_lease_ended
        self._on_arrival = on_arrival
        self._on_revoked = on_revoked
        self._on_migration = on_migration
        self._on_awaited = on_awaited
        self._on_ended = on_ended
        self._on_schedules = on_schedules
        self._on_fold_left = on_fold_left
        self._on_quarantines = on_quarantines
        self._listener = Listener(dsn, "windrow_work", self._on_message, application_name="windrow doorbell")
        database.went_away = self._listener.hang_up
        self._me = secrets.token_hex(8)
        self._queues: set[QueueId] = set()
        self._lease_ended: set[QueueId] = set()
        self._revoked: list[Revocation] = []
        self._revoked_leases = 0
        # The ids of jobs that wait to be sent, by the sign that is sent before them.
        self._jobs: dict[str, set[str]] = {_AWAITED: set(), _ENDED: set()}
        # Signs that are sent alone.
        self._alone: set[str] = set()
        self._calls = 0
        self._has_news = asyncio.Event()
        self._sending = asyncio.Lock()

    def ring(self, queues: Collection[QueueId], *, lease_ended: bool = False) -> None:
        """Notifies the other routers of these queues, after at most a short pause. Call this after the jobs, or the
        ends of leases, were committed."""
        if not queues:
            return
        (self._lease_ended if lease_ended else self._queues).update(queues)
        self._calls += 1
        self._has_news.set()

    def revoke(self, revocations: Sequence[Revocation]) -> None:
        """Notifies the other routers, after at most a short pause, of leases that have ended. Call this after the ends
        were committed."""
        for one in revocations:
            if self._revoked_leases + len(one.leases) <= _REVOKED_LEASES_MAX:
                self._revoked.append(one)
                self._revoked_leases += len(one.leases)
        self._calls += 1
        self._has_news.set()

    def tell_awaited(self, jobs: Collection[str]) -> None:
        """Notifies the other routers, after at most a short pause, that this router awaits the ends of these jobs."""
        self._tell(_AWAITED, jobs)

    def tell_ended(self, jobs: Collection[str]) -> None:
        """Notifies the other routers, after at most a short pause, that these jobs may have ended. Call this after the
        change was committed."""
        self._tell(_ENDED, jobs)

    def tell_schedules(self) -> None:
        """Notifies the other routers, after at most a short pause, that a schedule may be due earlier. Call this after
        the change was committed."""
        self._tell_alone(_SCHEDULES)

    def tell_quarantines(self) -> None:
        """Notifies the other routers, after at most a short pause, that kinds were quarantined or released. Call this
        after the change was committed."""
        self._tell_alone(_QUARANTINES)

    def hints_lost(self) -> None:
        """Makes all routers, including this router, look into all queues for which consumers wait. Call this if
        something may have been changed on this shard and nobody knows what (Database.hints_lost)."""
        self._on_lease_ended(None)
        self._on_ring(None)
        self._tell_alone(str(_LEASE_ENDED))
        self._tell_alone(_ALL)

    def _tell_alone(self, sign: str) -> None:
        self._alone.add(sign)
        self._calls += 1
        self._has_news.set()

    def _tell(self, sign: str, jobs: Collection[str]) -> None:
        if len(self._jobs[sign]) + len(jobs) <= _IDS_WAITING_MAX:
            self._jobs[sign].update(jobs)
        self._calls += 1
        self._has_news.set()

    async def finish(self) -> None:
        """Sends all notifications that wait, if the server can be reached."""
        await self._send()

    def reconnect(self, dsn: str) -> None:
        """Listens with another DSN from now on."""
        self._listener.reconnect(dsn)

    async def run(self) -> None:
        """Rings and listens until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ring())
            group.create_task(self._listener.run())

    async def _ring(self) -> None:
        while True:
            await self._has_news.wait()
            calls, self._calls = self._calls, 0
            await self._send()
            await asyncio.sleep(min(calls * _PAUSE_S, _PAUSE_S_MAX))

    async def _send(self) -> None:
        """Sends all that has not been sent yet."""
        async with self._sending:
            self._has_news.clear()
            queues, self._queues = self._queues, set()
            ended, self._lease_ended = self._lease_ended, set()
            revoked, self._revoked, self._revoked_leases = self._revoked, [], 0
            texts = [_REVOKED + text for text in revocation.texts(revoked)]
            for sign, jobs in self._jobs.items():
                named = list(jobs)
                jobs.clear()
                texts += [sign + ",".join(named[at : at + _IDS_MAX]) for at in range(0, len(named), _IDS_MAX)]
            texts += self._alone
            self._alone.clear()
            if queues:
                texts.append(",".join(map(str, queues)) if len(queues) <= _QUEUES_MAX else _ALL)
            if ended:
                numbers = [_LEASE_ENDED, *ended] if len(ended) < _QUEUES_MAX else [_LEASE_ENDED]
                texts.append(",".join(map(str, numbers)))
                if len(numbers) == 1:
                    texts.append(_ALL)
            if not texts:
                return
            try:
                messages = arrays.texts([f"{self._me} {text}" for text in texts])
                await self._database.run(statements.NOTIFY_WORK, {"messages": messages})
            except (ShardUnavailable, psycopg.Error) as error:
                _log.debug("could not notify the other routers: %s", error)
            except Exception:  # noqa: BLE001 - a lost hint must not end this router
                _log.exception("could not notify the other routers")

    def _on_message(self, message: str | None) -> None:
        if message is None:
            self._on_lease_ended(None)
            self._on_ring(None)
            self._on_schedules()
            self._on_quarantines()
            self._on_migration()
            return
        sender, _, text = message.partition(" ")
        if sender == _MIGRATION:
            self._on_migration()
        if sender == self._me:
            return
        try:
            if sender == _FOLD:
                self._on_fold_left(_workflows(text))
            elif text.startswith(_REVOKED):
                self._on_revoked(revocation.from_text(text.removeprefix(_REVOKED)))
            elif text.startswith(_ARRIVED):
                self._on_arrival(_queue_ids(text.removeprefix(_ARRIVED)))
            elif text == _SCHEDULES:
                self._on_schedules()
            elif text == _QUARANTINES:
                self._on_quarantines()
            elif text.startswith(_AWAITED):
                self._on_awaited(text.removeprefix(_AWAITED).split(","))
            elif text.startswith(_ENDED):
                self._on_ended(text.removeprefix(_ENDED).split(","))
            elif text == _ALL:
                self._on_ring(None)
            else:
                queues = _queue_ids(text)
                if queues[0] == _LEASE_ENDED:
                    queues = queues[1:]
                    self._on_lease_ended(queues or None)
                self._on_ring(queues)
        except ValueError:
            _log.warning("a notification on windrow_work is not from a router: %.100r", message)


def _queue_ids(text: str) -> list[QueueId]:
    return [QueueId(int(number)) for number in text.split(",")]


def _workflows(text: str) -> list[tuple[int, WorkflowId]]:
    pairs = [one.split("/") for one in text.split(",")]
    return [(int(org_id), WorkflowId(id_)) for org_id, id_ in pairs]
