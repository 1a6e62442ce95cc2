"""Runs one pass over one shard: does everything that is due, in steps. Each step is done completely or not at all. The
next pass does what this pass did not do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from archiver.errors import ExportFailed, NotInstalled
from archiver.export_location import ExportLocation
from archiver.settings import Settings
from shard.errors import Misconfigured
from shard.formatting import size_text
from shard.history import days, erasure
from shard.history.days import Aged, Day, InUse, NotExported
from shard.placement.cluster_file import ShardEntry
from shard.postgres import clock
from shard.postgres.leader_lock import ARCHIVER, LeaderSession, leader_session
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, ShardName

if TYPE_CHECKING:
    from archiver.export import Exported
    from archiver.object_store import Files

# The longest time that a pass spends on small steps of one kind. Later passes do the remaining steps. A step for a
# whole day has no limit of its time: the step may take long, but there are few days.
_PASS_S_MAX = 60.0


class AnotherArchives(Exception):
    """Another archiver works on the shard. The message names this archiver."""


@dataclass(slots=True, kw_only=True)
class Pass:
    """What one pass did."""

    shard: ShardName
    # The days that turned cold. Empty days are not in this list, because they are just dropped.
    turned_cold: list[Aged] = field(default_factory=list[Aged])
    # The days that this pass exported.
    exported: list[Exported] = field(default_factory=list["Exported"])
    dropped: list[Aged] = field(default_factory=list[Aged])
    dedup_keys: int = 0
    jobs_expired: int = 0
    dead_jobs_cancelled: int = 0
    # How many jobs that a legal hold had kept were dropped after the hold had ended.
    released_jobs_dropped: int = 0
    # How many erasures ended in this pass. All of them had begun before the pass.
    erased: int = 0
    # Texts about tables (of days, of held jobs or of old ids) that could not be changed, because another session held a
    # lock or because another object depends on the table. A text names the object, or the session if it is known. The
    # next pass tries again.
    in_use: list[str] = field(default_factory=list[str])
    # Days that could not be exported, and why. These days are not dropped.
    not_exported: list[str] = field(default_factory=list[str])
    # Erasures that cannot end, and why.
    stuck: list[str] = field(default_factory=list[str])
    # Whether the pass had no time for some of the small steps.
    more: bool = False
    seconds: float = 0.0
    # The longest time for which enqueues and acks may have waited.
    locked_s_max: float = 0.0

    @property
    def left_something(self) -> bool:
        """Whether the next pass has more to do."""
        return bool(self.in_use or self.not_exported or self.stuck or self.more)

    @property
    def did_something(self) -> bool:
        return bool(
            self.turned_cold
            or self.exported
            or self.dropped
            or self.dedup_keys
            or self.jobs_expired
            or self.dead_jobs_cancelled
            or self.released_jobs_dropped
            or self.erased
        )

    def __str__(self) -> str:
        parts = [
            _days_text(self.turned_cold, "turned cold"),
            _days_text(self.exported, "exported"),
            _days_text(self.dropped, "dropped"),
            f"{self.dedup_keys:,} dedup key(s) forgotten" if self.dedup_keys else "",
            f"{self.jobs_expired:,} job(s) past their expires_at cancelled" if self.jobs_expired else "",
            f"{self.dead_jobs_cancelled:,} old dead job(s) cancelled" if self.dead_jobs_cancelled else "",
            f"{self.released_jobs_dropped:,} job(s) dropped that a legal hold had kept"
            if self.released_jobs_dropped
            else "",
            f"{len(self.in_use)} day(s) in use" if self.in_use else "",
            f"{len(self.not_exported)} day(s) not exported" if self.not_exported else "",
            f"{len(self.stuck)} erasure(s) stuck" if self.stuck else "",
            "more is left" if self.more else "",
        ]
        done = "; ".join(part for part in parts if part) or "nothing was due"
        locked = f", locked for {self.locked_s_max * 1000:.1f} ms at most" if self.turned_cold else ""
        return f"shard {self.shard!r}: {done} ({self.seconds:.2f} s{locked})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exports:
    """Where exports are written, for which cluster, and the leader session that must hold while they are written."""

    location: ExportLocation
    cluster: str
    session: LeaderSession


async def pass_over(
    entry: ShardEntry, database: Database, settings: Settings, *, cluster: str, digest: str, stop: asyncio.Event
) -> Pass:
    """Does what is due. Returns when nothing more can be done now, or soon after `stop` is set. Raises AnotherArchives,
    ClocksDiffer, ShardUnavailable."""
    async with leader_session(entry.dsn, digest, role=ARCHIVER, shard=entry.name) as session:
        if not await session.lead():
            who = await session.leader() or "it has just ended"
            raise AnotherArchives(f"shard {entry.name!r}: another archiver is at work: {who}")
        began_s = time.monotonic()
        summary = Pass(shard=entry.name)
        exports = (
            None if settings.export is None else _Exports(location=settings.export, cluster=cluster, session=session)
        )
        await _days(summary, database, exports, stop)
        # Exports may have taken hours, so check the clock again.
        await clock.check_difference(database)
        if not stop.is_set():
            try:
                await days.drop_past_ids(database)
            except InUse as error:
                summary.in_use.append(str(error))
        summary.dedup_keys = (await _repeat(summary, partial(days.expire_dedup, database), stop)).total
        summary.jobs_expired = (await _repeat(summary, partial(days.expire_waiting, database), stop)).total
        retire_dead = partial(days.retire_dead, database, days=settings.dead_days)
        summary.dead_jobs_cancelled = (await _repeat(summary, retire_dead, stop)).total
        try:
            released = await _repeat(summary, partial(days.expire_released, database), stop)
        except InUse as error:
            summary.in_use.append(str(error))
        else:
            summary.released_jobs_dropped = released.total
        for unfinished in await erasure.unfinished(database):
            try:
                erased = await _repeat(summary, partial(erasure.go_on, database, unfinished), stop)
            except Misconfigured as error:
                summary.stuck.append(str(error))
            else:
                summary.erased += erased.ended
        summary.more = summary.more or stop.is_set()
        summary.seconds = time.monotonic() - began_s
        return summary


async def _days(summary: Pass, database: Database, exports: _Exports | None, stop: asyncio.Event) -> None:
    await clock.check_difference(database)
    for over in await days.days_over(database):
        if not stop.is_set():
            await _record_step(summary, summary.turned_cold, days.turn_cold(database, over))
    # Turning days cold may have taken hours, so check the clock again: the clock decides which days are dropped now.
    await clock.check_difference(database)
    for past in await days.days_past(database):
        if not stop.is_set():
            await _drop(summary, database, past, exports, stop)


async def _drop(summary: Pass, database: Database, day: Day, exports: _Exports | None, stop: asyncio.Event) -> None:
    exported: Mapping[OrgId, int] | None = None
    try:
        # Jobs of retention 0 are not kept, so they are not exported either.
        if exports is not None and day.retention:
            exported = await _export(summary, database, day, exports, stop)
            if exported is None:
                return
        await _record_step(summary, summary.dropped, days.drop(database, day, exported=exported))
    except (ExportFailed, NotExported) as error:
        summary.not_exported.append(f"{day.name} stays: {error}")


async def check_export(location: ExportLocation) -> None:
    """Checks that the libraries for exports are installed. If the location is a directory, also checks that files can
    be created in it. Sends no request to a bucket. Raises ExportFailed."""
    files = await _open_files(location)
    await asyncio.to_thread(files.check)


async def _open_files(location: ExportLocation) -> Files:
    """Opens a location for writing. Raises ExportFailed."""
    try:
        # Import this only when it is needed, because the library is large.
        from archiver import export
    except ModuleNotFoundError as error:
        raise NotInstalled(error.name) from error
    return await export.open_files(location, make=True)


async def _export(
    summary: Pass, database: Database, day: Day, exports: _Exports, stop: asyncio.Event
) -> Mapping[OrgId, int] | None:
    """Exports a day. Returns how many jobs of each org were exported from the table, or None if the export was told to
    stop. Raises ExportFailed."""
    files = await _open_files(exports.location)
    from archiver import export

    try:
        exported = await export.export_day(
            files, database, day, cluster=exports.cluster, lead=exports.session.lead, stop=stop
        )
    except export.Stopped:
        return None
    if exported.written and exported.jobs:
        summary.exported.append(exported)
    # The export may have taken hours. Check that this process still leads: if not, another archiver might be about to
    # export the day again.
    await exports.session.lead()
    await export.still_there(files, exported, day, database.name)
    return exported.in_table


async def _record_step(summary: Pass, aged: list[Aged], step: Awaitable[Aged]) -> None:
    try:
        partition = await step
    except InUse as error:
        summary.in_use.append(str(error))
    else:
        if aged is summary.turned_cold:
            # Record the lock time only when a day turns cold. A lock on a day that is already cold hardly delays
            # enqueues and acks, because they read cold days only to look for old ids.
            summary.locked_s_max = max(summary.locked_s_max, partition.locked_s)
        if partition.jobs:
            aged.append(partition)


class _Repeated(NamedTuple):
    # The sum of the numbers that the steps returned.
    total: int
    # Whether the last step found nothing more to do.
    ended: bool


async def _repeat(summary: Pass, step: Callable[[], Awaitable[int]], stop: asyncio.Event) -> _Repeated:
    """Repeats a step until it finds nothing more to do, or until the pass has no more time for this step."""
    count, give_up_s = 0, time.monotonic() + _PASS_S_MAX
    while not stop.is_set():
        step_count = await step()
        if not step_count:
            return _Repeated(count, ended=True)
        count += step_count
        if time.monotonic() > give_up_s:
            summary.more = True
            break
    return _Repeated(count, ended=False)


def _days_text(aged: Sequence[Aged | Exported], how: str) -> str:
    if not aged:
        return ""
    jobs, size = sum(each.jobs for each in aged), sum(each.bytes for each in aged)
    return f"{len(aged)} day(s) {how}: {jobs:,} job(s), {size_text(size)}"
