"""One shard as this router knows it: its store and its books, who waits for its jobs, and what keeps it up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Self

from router.upkeep import attempt, every
from router.waiting import SWEEP_S, Room
from shard import history
from shard.books import Books
from shard.cluster import ShardEntry, ShardState
from shard.database import Database, Mark
from shard.doorbell import Doorbell
from shard.errors import Misconfigured, ShardError, ShardUnavailable
from shard.history import MARK_S, Made
from shard.store import Store
from shard.vocabulary import ShardName

_log = logging.getLogger(__name__)

# How long a clock that was set back can go unnoticed.
_RECORD_TIME_S = 3.0
_FOLD_TALLY_S = 60.0
_MAKE_PARTITIONS_S = 3600.0
_RETRY_OPEN_S = 1.0
_FINISH_S_MAX = 3.0


class Member:
    """A shard of the cluster file, from when the file names it until it no longer does. Not contacted before `start`.

    `prove` makes a database fit for use, and raises a ShardError unless it is the shard that it is taken for. `proved`
    is called when the member can be used, or is reached by another DSN. `confirm` has the catalog take note of a mark
    in the shard's history, and answers whether it did.
    """

    def __init__(
        self,
        entry: ShardEntry,
        *,
        connections: int,
        prove: Callable[[Database], Awaitable[None]],
        proved: Callable[[Member], Awaitable[None]],
        confirm: Callable[[ShardName, Made], Awaitable[bool]],
    ) -> None:
        # As the cluster file in force has it.
        self.entry = entry
        # By which it is reached: the entry's, once that has proved to lead to this shard.
        self.dsn = entry.dsn
        self.up = asyncio.Event()
        # What keeps it from being up, or from going over to another DSN; empty: nothing.
        self.trouble = "its state is off" if entry.state is ShardState.OFF else "not contacted yet"
        self._prove = prove
        self._proved = proved
        self._confirm = confirm
        self._queue_database = Database(entry.name, entry.dsn, connections=connections)
        self._books_database = Database(entry.name, entry.dsn, connections=2, for_books=True)
        self._databases = (self._queue_database, self._books_database)
        self.store = Store(self._queue_database)
        self.books = Books(self._books_database)
        self._migrated = asyncio.Event()
        self._doorbell = Doorbell(
            self._queue_database,
            entry.dsn,
            heard=lambda queues: self.room.heard(queues),
            arrived=lambda queues: self.room.arrived(queues),
            migrated=lambda: self._migrated.set(),
        )
        self.room = Room(self.store, self._doorbell)
        self.room.gives = entry.state.gives_jobs
        self._keeping: asyncio.Task[None] | None = None
        self._going_over: asyncio.Task[None] | None = None
        # A mark that is written, and that the catalog may not know.
        self._unconfirmed: Made | None = None
        self._group: asyncio.TaskGroup | None = None
        self._checking: asyncio.Task[None] | None = None

    @property
    def name(self) -> ShardName:
        return self.entry.name

    # ── What may be asked of it ──────────────────────────────────────────────────────────────────────────────────────
    # Each answers the member itself, or raises ShardUnavailable.

    def to_look_at(self) -> Self:
        if not self.up.is_set():
            raise ShardUnavailable(self.name, self.trouble)
        return self

    def to_change(self) -> Self:
        """Acks and the like, and what changes queues."""
        if not self.entry.state.takes_changes:
            raise self._forbidden("takes no changes")
        return self.to_look_at()

    def to_enqueue(self) -> Self:
        if not self.entry.state.takes_enqueues:
            raise self._forbidden("takes no enqueues")
        return self.to_look_at()

    def _forbidden(self, what: str) -> ShardUnavailable:
        return ShardUnavailable(self.name, f"its state is {self.entry.state.word}, and it {what}")

    # ── What the cluster file says of it ─────────────────────────────────────────────────────────────────────────────

    def start(self, group: asyncio.TaskGroup) -> None:
        """Contacts it, and keeps it up until it is dismissed or the group's end, unless it is off."""
        self._group = group
        if self.entry.state is not ShardState.OFF:
            self._keeping = group.create_task(self._keep())

    def goes_on_as(self, entry: ShardEntry) -> bool:
        """Whether `update` will do. Else another member must take its place: where it is to be contacted from now on or
        no longer, and where a DSN that has led nowhere is mended."""
        same_contact = (self.entry.state is ShardState.OFF) == (entry.state is ShardState.OFF)
        return same_contact and (self.up.is_set() or self.entry.dsn == entry.dsn)

    def update(self, entry: ShardEntry, group: asyncio.TaskGroup) -> None:
        """The file has changed; calls under way end as they began."""
        if entry.dsn != self.entry.dsn:
            if self._going_over is not None:
                self._going_over.cancel()
                self._going_over = None
                self.trouble = ""
            if entry.dsn != self.dsn:
                self._going_over = group.create_task(self._go_over(entry.dsn))
        self.entry = entry
        self.room.gives = entry.state.gives_jobs

    def dismiss(self, why: str) -> None:
        """Calls under way may end; whoever comes is told why there are no more."""
        self.up.clear()
        self.trouble = why
        for task in (self._keeping, self._going_over, self._checking):
            if task is not None:
                task.cancel()
        # They wait elsewhere from now on, or are told that they cannot.
        self.room.wake_all()

    def must_have(self, mark: Mark | None) -> None:
        """The catalog has confirmed this mark in the shard's history. Each connection that is made from now on is asked
        for it, and so are those that were made since the last time."""
        for database in self._databases:
            database.mark = mark
        if mark is None or not self.up.is_set() or (self._checking is not None and not self._checking.done()):
            return
        if self._group is not None and any(database.reconnected for database in self._databases):
            self._checking = self._group.create_task(
                attempt(f"compare the history of shard {self.name!r}", lambda: self._compare(mark))
            )

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep(self) -> None:
        """Brings it up and keeps it so, until cancelled. Its troubles end here: they are its own orgs' alone."""
        try:
            await self._queue_database.open()
            await self._books_database.open()
            await self._until_proved(self._queue_database, "")
            self._books_database.identity = self._queue_database.identity
            self._books_database.newest_migration = self._queue_database.newest_migration
            record_time = self._where_allowed(self.store.clock.record)
            await attempt(f"look at the clock of shard {self.name!r}", record_time)
            self.up.set()
            await self._proved(self)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._doorbell.run())
                group.create_task(self.room.run())
                group.create_task(self._check_schema())
                for interval_s, what, act in (
                    (SWEEP_S, "sweep the lanes", self.room.sweep),
                    (_RECORD_TIME_S, "look at the clock", self.store.clock.record),
                    (_FOLD_TALLY_S, "fold the tally", self.store.fold_tally),
                    (_MAKE_PARTITIONS_S, "make partitions", self.books.make_partitions),
                    (MARK_S, "mark the history", self._mark),
                ):
                    group.create_task(every(interval_s, f"{what} of shard {self.name!r}", self._where_allowed(act)))
        finally:
            await self.finish()
            await self._queue_database.close()
            await self._books_database.close()

    async def _check_schema(self) -> None:
        """Stops using the shard when a newer release has migrated it beyond what this one can work with."""
        while True:
            await self._migrated.wait()
            self._migrated.clear()
            for database in (self._queue_database, self._books_database):
                await attempt(f"check the schema of shard {self.name!r}", database.check_schema)

    async def finish(self) -> None:
        """Lets it do what it has been asked for: jobs that reached no consumer still go back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_S_MAX):
                await self.store.finish()

    def _where_allowed(self, act: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
        """Upkeep changes things too."""

        async def allowed() -> None:
            if self.entry.state.takes_changes:
                await act()

        return allowed

    async def _mark(self) -> None:
        """Marks the shard's history, if this router may have changed something since the last time."""
        if not any(database.changed for database in self._databases):
            return
        for database in self._databases:
            database.changed = False
        covered = False
        try:
            # Others mark it too. What this router has done may be younger than their mark: then it comes again.
            earlier = self._unconfirmed
            made = earlier or await history.make(self._queue_database, apart_s=0.8 * MARK_S)
            # While the catalog is away, no further mark is written.
            self._unconfirmed = made
            if made is not None:
                confirmed = await self._confirm(self.name, made)
                self._unconfirmed = None
                covered = confirmed and earlier is None
                if not confirmed:
                    # The catalog may know a mark that this database lacks: the next look at the catalog tells.
                    self._queue_database.reconnected = True
        finally:
            if not covered:
                self._queue_database.changed = True

    async def _compare(self, mark: Mark) -> None:
        for database in self._databases:
            database.reconnected = False
            try:
                comparison = await history.compare(database, mark)
            except ShardError:
                database.reconnected = True
                raise
            if comparison.lost:
                # Each is made anew, and refused as long as it leads there.
                for one in self._databases:
                    one.hang_up()
                return

    async def _go_over(self, dsn: str) -> None:
        """To another DSN, once that has proved to lead to the same shard; until then the one before serves."""
        newcomer = Database(self.name, dsn, connections=1)
        try:
            await newcomer.open()
            await self._until_proved(newcomer, "its new DSN is not in force yet: ")
        finally:
            await newcomer.close()
        # From here on it is done to its end, whatever the file says next.
        self._going_over = None
        self.dsn = dsn
        self._doorbell.reconnect(dsn)
        for database in (self._queue_database, self._books_database):
            database.identity = newcomer.identity
            await database.reconnect(dsn)
        await self._proved(self)
        _log.info("shard %r is reached by its new DSN", self.name)

    async def _until_proved(self, database: Database, trouble: str) -> None:
        """`trouble`: what is told of it begins with this."""
        said = ""
        while True:
            try:
                await self._prove(database)
            except ShardError as error:
                # What is wrong with the catalog, is said of the catalog.
                why = error.why if isinstance(error, ShardUnavailable) and error.shard == self.name else str(error)
                if why != said:
                    said = why
                    level = logging.ERROR if isinstance(error, Misconfigured) else logging.WARNING
                    _log.log(level, "%s%s", trouble, error)
            except Exception as error:  # noqa: BLE001 - one shard's trouble must not end the others
                why = "an unexpected error; the router's log has the details"
                if str(error) != said:
                    said = str(error)
                    _log.exception("could not bring up shard %r", self.name)
            else:
                self.trouble = ""
                return
            self.trouble = trouble + why
            await asyncio.sleep(_RETRY_OPEN_S)
