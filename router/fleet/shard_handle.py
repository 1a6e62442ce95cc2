"""One shard as this router knows it: its store, its queue admin, its wait room, and the tasks that keep it up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Self

from router.fleet.all_orgs import AllOrgs
from router.fleet.end_waits import EndWaits
from router.fleet.handover import Handovers
from router.fleet.periodic import every, keep_on
from router.fleet.ready_orgs import ReadyOrgs
from router.fleet.schedules import Scheduler
from router.fleet.siblings.frame import QueueKey
from router.fleet.siblings.siblings import Siblings
from router.fleet.starts import Starts
from router.fleet.wait_room import WaitRoom
from shard.admin.queue_admin import QueueAdmin
from shard.attempts import attempt
from shard.errors import Misconfigured, ShardError, ShardUnavailable
from shard.health import signs
from shard.health.signs import Signs
from shard.placement import marks
from shard.placement.cluster_file import ShardEntry, ShardState
from shard.placement.marks import MARK_S, Made
from shard.postgres.pool import Database, Mark
from shard.queue import consumers_seen
from shard.queue.doorbell import Doorbell
from shard.queue.revocation import Revocation
from shard.queue.store import Store
from shard.schedules.due_schedules import DueSchedules
from shard.schedules.schedule_admin import ScheduleAdmin
from shard.vocabulary import OrgId, ShardName
from shard.workflows.additions import NodeAdder
from shard.workflows.calls import WorkflowCalls
from shard.workflows.sweep import Left, WorkflowSweep
from shard.workflows.workflow_admin import WorkflowAdmin

_log = logging.getLogger(__name__)

# The interval of clock checks: a clock that was set back can go unnoticed for that long.
_RECORD_TIME_S = 3.0
_FOLD_TALLY_S = 60.0
_FORGET_BUCKETS_S = 60.0
_MAKE_PARTITIONS_S = 3600.0
_FORGET_WORKFLOWS_S = 3600.0
_RETRY_OPEN_S = 1.0
_FINISH_S_MAX = 3.0


class ShardHandle:
    """A shard that the cluster file names. This router does not contact the shard before `start` is called.

    `prove` prepares a database for use, and raises a ShardError if the database is not that of this shard. `proved` is
    called when the shard can be used, and again when another DSN has come into use. `confirm` records a mark of the
    shard's history in the catalog, and returns whether the mark was recorded. `revoked` is called with the leases of
    this shard that were ended by somebody other than their consumer, through this router or another one. `elsewhere`
    returns the other shards that may have live jobs of an org, or None if this router does not know them.
    """

    def __init__(
        self,
        entry: ShardEntry,
        *,
        connections: int,
        sweep_s: float,
        prove: Callable[[Database], Awaitable[None]],
        proved: Callable[[ShardHandle], Awaitable[None]],
        confirm: Callable[[ShardName, Made], Awaitable[bool]],
        revoked: Callable[[ShardName, Sequence[Revocation]], None],
        siblings: Siblings,
        elsewhere: Callable[[OrgId, ShardName], Sequence[ShardHandle] | None],
        pools: AllOrgs,
        starts: Starts,
    ) -> None:
        # The shard's entry in the current cluster file.
        self.entry = entry
        # The DSN in use. A new DSN of the entry comes into use as soon as a check has found that it leads to this
        # shard.
        self.dsn = entry.dsn
        self.up = asyncio.Event()
        # Why the shard is not up, or why its new DSN is not in use yet; empty if there is no such problem.
        self.trouble = "its state is off" if entry.state is ShardState.OFF else "not contacted yet"
        self._sweep_s = sweep_s
        self._prove = prove
        self._proved = proved
        self._confirm = confirm
        self._queue_database = Database(entry.name, entry.dsn, connections=connections, kept=connections)
        self._admin_database = Database(entry.name, entry.dsn, connections=2, may_scan=True)
        self._databases = (self._queue_database, self._admin_database)
        self.store = Store(self._queue_database)
        self.queue_admin = QueueAdmin(self._admin_database, self.store.clock)
        self._migrated = asyncio.Event()
        self._quarantines_changed = asyncio.Event()
        self._workflows_wait = asyncio.Event()
        self._doorbell = Doorbell(
            self._queue_database,
            entry.dsn,
            on_ring=lambda queues: self.room.on_doorbell(queues),
            on_arrival=lambda queues: self.room.arrived(queues),
            on_revoked=lambda revocations: revoked(entry.name, revocations),
            on_migration=lambda: self._migrated.set(),
            on_awaited=lambda jobs: self.ends.awaited_elsewhere(jobs),
            on_ended=lambda jobs: self.ends.ended(jobs),
            on_schedules=lambda: self.scheduler.look(),
            on_lease_ended=lambda queues: self.room.lease_ended(queues),
            on_fold_left=lambda workflows: self._fold_left(workflows),
            on_quarantines=lambda: self._quarantines_changed.set(),
        )

        def tell_all(revocations: Sequence[Revocation]) -> None:
            revoked(entry.name, revocations)
            self._doorbell.revoke(revocations)

        self.store.on_revoked = tell_all
        self.store.quarantine.on_changed = self._doorbell.tell_quarantines
        for database in self._databases:
            database.hints_lost = self._doorbell.hints_lost
        self._pools = pools
        self.ready_orgs = ReadyOrgs(
            self.store,
            sweep_s=sweep_s,
            on_ready=lambda org, queue: None if self.room.is_full(org, queue) else pools.found(entry.name, org, queue),
        )
        self.ready_orgs.serve(pools.queues)
        self.room = WaitRoom(self.store, self._doorbell, pools, self.ready_orgs, sweep_s=sweep_s)
        self.room.gives = entry.state.gives_jobs
        self.room.on_ready = lambda org, queue: siblings.tell_ready(QueueKey(entry.name, org, queue))
        self.room.on_gone = lambda org, queue: siblings.tell_gone(QueueKey(entry.name, org, queue))
        self.handovers = Handovers(self.store, self.room, pools, siblings, starts)
        self.scheduler: Scheduler = Scheduler(
            DueSchedules(self._queue_database, self.store),
            self.store,
            sweep_s=sweep_s,
            may_fire=lambda: self.entry.state.takes_enqueues,
            elsewhere=lambda org: elsewhere(org, entry.name),
        )

        def schedule_changed() -> None:
            self.scheduler.look()
            self._doorbell.tell_schedules()

        self.schedule_admin = ScheduleAdmin(self._admin_database, self.store, schedule_changed)
        self._workflow_sweep: WorkflowSweep = WorkflowSweep(self._queue_database, self.store)
        workflow_calls = WorkflowCalls(self._queue_database, self.store)
        self.workflows = WorkflowAdmin(self._queue_database, self.store, workflow_calls, self._workflow_sweep)
        self.node_adder = NodeAdder(self._queue_database, self.store, workflow_calls)
        self.ends: EndWaits = EndWaits(self.store, self._doorbell)
        self._keeping: asyncio.Task[None] | None = None
        # The task that switches to the entry's new DSN.
        self._switching: asyncio.Task[None] | None = None
        # A mark that was written to the shard, and that the catalog may not know yet.
        self._unconfirmed: Made | None = None
        self._group: asyncio.TaskGroup | None = None
        self._checking: asyncio.Task[bool] | None = None

    @property
    def name(self) -> ShardName:
        return self.entry.name

    @property
    def is_usable(self) -> bool:
        """Whether calls can use the shard now."""
        return self.up.is_set() and not self._queue_database.is_away

    async def signs(self) -> Signs:
        """Reads signs that the shard needs an operator. Raises ShardUnavailable."""
        return await signs.read(self._admin_database)

    # ── Guards: each returns this handle, or raises ShardUnavailable ─────────────────────────────────────────────────

    def require_up(self) -> Self:
        """Call this before every read."""
        if not self.up.is_set():
            raise ShardUnavailable(self.name, self.trouble)
        return self

    def require_writable(self) -> Self:
        """Call this before every change except an enqueue: acks, nacks, queue configurations and so on."""
        if not self.entry.state.takes_changes:
            raise self._forbidden("takes no changes")
        return self.require_up()

    def require_open(self) -> Self:
        """Call this before every enqueue."""
        if not self.entry.state.takes_enqueues:
            raise self._forbidden("takes no enqueues")
        return self.require_up()

    def _forbidden(self, what: str) -> ShardUnavailable:
        return ShardUnavailable(self.name, f"its state is {self.entry.state.word}, and it {what}")

    # ── The cluster file ─────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, group: asyncio.TaskGroup) -> None:
        """Connects to the shard and keeps it up until `dismiss` or the end of the group. Does nothing if the shard's
        state is off."""
        self._group = group
        if self.entry.state is not ShardState.OFF:
            self._keeping = group.create_task(self._keep())

    def goes_on_as(self, entry: ShardEntry) -> bool:
        """Returns whether `update` can apply the new entry. If not, a new handle must replace this one. That is so if
        the state changes from or to off, or if the DSN changes before the shard was ever up."""
        same_contact = (self.entry.state is ShardState.OFF) == (entry.state is ShardState.OFF)
        return same_contact and (self.up.is_set() or self.entry.dsn == entry.dsn)

    def update(self, entry: ShardEntry, group: asyncio.TaskGroup) -> None:
        """Applies a changed entry. Running calls are not disturbed."""
        if entry.dsn != self.entry.dsn:
            if self._switching is not None:
                self._switching.cancel()
                self._switching = None
                self.trouble = ""
            if entry.dsn != self.dsn:
                self._switching = group.create_task(self._switch(entry.dsn))
        self.entry = entry
        self.room.gives = entry.state.gives_jobs

    def dismiss(self, why: str) -> None:
        """Stops using the shard. Running calls may still end; new calls fail with `why`."""
        self.up.clear()
        self.trouble = why
        for task in (self._keeping, self._switching, self._checking):
            if task is not None:
                task.cancel()
        # The consumers that are woken wait on the other shards of their orgs, or fail if there are no other shards.
        self.room.wake_all()
        self.ends.wake_all()
        self._pools.lost(self.name)

    def must_have(self, mark: Mark | None) -> None:
        """Requires that the shard's history contains this mark, which the catalog has confirmed. Checks this on every
        connection that is made from now on, and on the connections that were made since the last call."""
        for database in self._databases:
            database.mark = mark
        if mark is None or not self.up.is_set() or (self._checking is not None and not self._checking.done()):
            return
        is_ending = self._keeping is not None and self._keeping.cancelling() > 0
        # No task can be added to a group that is ending.
        if self._group is not None and not is_ending and any(database.reconnected for database in self._databases):
            self._checking = self._group.create_task(
                attempt(f"compare the history of shard {self.name!r}", lambda: self._compare(mark))
            )

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep(self) -> None:
        """Brings the shard up and keeps it up until cancelled. Handles the shard's errors itself, so that they affect
        only the orgs on this shard."""
        try:
            await self._queue_database.open()
            await self._admin_database.open()
            await self._until_proved(self._queue_database, "")
            self._admin_database.identity = self._queue_database.identity
            self._admin_database.newest_migration = self._queue_database.newest_migration
            record_time = self._where_allowed(self.store.clock.record)
            await attempt(f"look at the clock of shard {self.name!r}", record_time)
            # Read the quarantined kinds before the first claim, which must not take jobs of these kinds.
            await attempt(f"read the quarantined kinds of shard {self.name!r}", self.store.quarantine.refresh)
            self.up.set()
            await self._proved(self)
            async with asyncio.TaskGroup() as group:
                for what, run in (
                    ("ring and listen", self._doorbell.run),
                    ("look for due jobs", self.room.run),
                    ("look for orgs with ready jobs", self.ready_orgs.run),
                    ("look for the ends of jobs", self.ends.run),
                    ("fire the schedules", self.scheduler.run),
                    ("go on with workflows", self._go_on_with_folds),
                    ("sweep the workflows", self._sweep_workflows),
                    ("check the schema", self._check_schema),
                    ("read the quarantined kinds", self._read_quarantines),
                    ("record the consumers", self._record_consumers),
                ):
                    group.create_task(keep_on(f"{what} of shard {self.name!r}", run))
                for interval_s, what, act in (
                    (self._sweep_s, "sweep the lanes", self._sweep),
                    (self._sweep_s, "look for orgs with ready jobs", self.ready_orgs.sweep),
                    (_FORGET_WORKFLOWS_S, "forget workflows", self._workflow_sweep.forget),
                    (_RECORD_TIME_S, "look at the clock", self.store.clock.record),
                    (_FOLD_TALLY_S, "fold the tally", self.store.fold_tally),
                    (consumers_seen.NOTE_S, "note the consumers", self._note_consumers),
                    (_FORGET_BUCKETS_S, "forget full buckets", self.store.forget_full_buckets),
                    (_MAKE_PARTITIONS_S, "make partitions", self.queue_admin.make_partitions),
                    (MARK_S, "mark the history", self._mark),
                ):
                    group.create_task(every(interval_s, f"{what} of shard {self.name!r}", self._where_allowed(act)))
        finally:
            await self.finish()
            await self._queue_database.close()
            await self._admin_database.close()

    async def _sweep(self) -> None:
        if await self.room.sweep():
            self._workflows_wait.set()

    async def _sweep_workflows(self) -> None:
        """Sweeps the workflows each time a sweep of the lanes has found that workflows need it. Runs in a task of its
        own, because the lanes must not wait for hundreds of workflows."""
        what, sweep = f"sweep the workflows of shard {self.name!r}", self._where_allowed(self._workflow_sweep.sweep)
        failing = False
        while True:
            await self._workflows_wait.wait()
            self._workflows_wait.clear()
            failing = not await attempt(what, sweep, level=logging.DEBUG if failing else logging.WARNING)

    async def _go_on_with_folds(self) -> None:
        what = f"go on with workflows of shard {self.name!r}"
        while True:
            await attempt(what, self._workflow_sweep.go_on, level=logging.DEBUG)

    def _fold_left(self, workflows: Collection[Left]) -> None:
        if self.entry.state.takes_changes:
            self._workflow_sweep.left(workflows)

    async def _note_consumers(self) -> None:
        self._pools.note(self.store)
        await self.room.note_waiters()

    async def _check_schema(self) -> None:
        """Checks the schema after each migration: a newer release may have made the shard unusable for this release."""
        while True:
            await self._migrated.wait()
            self._migrated.clear()
            for database in (self._queue_database, self._admin_database):
                await attempt(f"check the schema of shard {self.name!r}", database.check_schema)

    async def _read_quarantines(self) -> None:
        """Reads the quarantined kinds when another router has changed them."""
        what = f"read the quarantined kinds of shard {self.name!r}"
        while True:
            await self._quarantines_changed.wait()
            self._quarantines_changed.clear()
            await attempt(what, self.store.quarantine.refresh)

    async def _record_consumers(self) -> None:
        """Writes to the shard which consumers were seen, because ExplainJob reads this. Writes nothing while there is
        no consumer."""
        seen = self.store.consumers_seen
        what, write = f"record the consumers of shard {self.name!r}", self._where_allowed(seen.write)
        failing = False
        while True:
            await seen.noted.wait()
            failing = not await attempt(what, write, level=logging.DEBUG if failing else logging.WARNING)
            await asyncio.sleep(consumers_seen.PAUSE_S)

    async def finish(self) -> None:
        """Waits until the running calls have ended. Some of these calls release jobs that reached no consumer. So this
        method also waits until other routers have been notified of these releases. It waits at most 3 s."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_S_MAX):
                await self.store.finish()
                await self._doorbell.finish()

    def _where_allowed(self, act: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
        """Returns a function that runs `act`, and that does nothing while the shard's state forbids changes."""

        async def allowed() -> None:
            if self.entry.state.takes_changes:
                await act()

        return allowed

    async def _mark(self) -> None:
        """Writes a mark to the shard's history, if this router may have changed something since the last mark."""
        if not any(database.changed for database in self._databases):
            return
        for database in self._databases:
            database.changed = False
        covered = False
        try:
            # `make` writes no mark if another router has just written one. That mark may be older than this router's
            # changes, so `covered` stays False, and the next call tries to write another mark.
            earlier = self._unconfirmed
            made = earlier or await marks.make(self._queue_database, apart_s=0.8 * MARK_S)
            # While the catalog does not answer, each call tries to confirm this mark again, and writes no further mark.
            self._unconfirmed = made
            if made is not None:
                confirmed = await self._confirm(self.name, made)
                self._unconfirmed = None
                covered = confirmed and earlier is None
                if not confirmed:
                    # The catalog may know a mark that this database lacks: compare the catalog and the database after
                    # the next read of the catalog.
                    self._queue_database.reconnected = True
        finally:
            if not covered:
                self._queue_database.changed = True

    async def _compare(self, mark: Mark) -> None:
        for database in self._databases:
            database.reconnected = False
            try:
                comparison = await marks.compare(database, mark)
            except ShardError:
                database.reconnected = True
                raise
            if comparison.lost:
                # Close all connections. New connections are checked, and are refused while they lead to a database
                # without the mark.
                for lost in self._databases:
                    lost.hang_up()
                return

    async def _switch(self, dsn: str) -> None:
        """Switches to another DSN as soon as a check has found that it leads to the same shard. Until then the old DSN
        stays in use."""
        candidate = Database(self.name, dsn, connections=1)
        try:
            await candidate.open()
            await self._until_proved(candidate, "its new DSN is not in use yet: ")
        finally:
            await candidate.close()
        # From here on the switch must not be cancelled, even if the cluster file changes again.
        self._switching = None
        self.dsn = dsn
        self._doorbell.reconnect(dsn)
        for database in (self._queue_database, self._admin_database):
            database.identity = candidate.identity
            await database.reconnect(dsn)
        await self._proved(self)
        _log.info("shard %r is reached by its new DSN", self.name)

    async def _until_proved(self, database: Database, prefix: str) -> None:
        """Calls `prove` every second until it accepts the database. `self.trouble` begins with `prefix`, and so does
        the log line about a ShardError."""
        logged = ""
        while True:
            try:
                await self._prove(database)
            except ShardError as error:
                # The error may be about the catalog. Then `trouble` must name the catalog, as the error's text does.
                why = error.why if isinstance(error, ShardUnavailable) and error.shard == self.name else str(error)
                if why != logged:
                    logged = why
                    level = logging.ERROR if isinstance(error, Misconfigured) else logging.WARNING
                    _log.log(level, "%s%s", prefix, error)
            except Exception as error:  # noqa: BLE001 - one shard's trouble must not end the others
                why = "an unexpected error; the router's log has the details"
                if str(error) != logged:
                    logged = str(error)
                    _log.exception("could not bring up shard %r", self.name)
            else:
                self.trouble = ""
                return
            self.trouble = prefix + why
            await asyncio.sleep(_RETRY_OPEN_S)
