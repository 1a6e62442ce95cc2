"""One pass over one shard: everything there that is due, in steps that are each done or not done. What a pass leaves,
the next one finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from archiver.errors import ExportFailed, NotInstalled
from archiver.place import Place
from archiver.settings import Settings
from shard import archiving, erasing
from shard.archiving import Aged, Day, InUse, NotExported
from shard.cluster import ShardEntry
from shard.database import Database
from shard.errors import Misconfigured
from shard.leading import ARCHIVER, Candidate, candidacy
from shard.vocabulary import OrgId, ShardName
from shard.words import size_text

if TYPE_CHECKING:
    from archiver.exporting import Exported

# Of small steps: a backlog is left to the passes that follow. Days are not counted: each takes its time, and is rare.
_PASS_S_MAX = 60.0


class AnotherArchives(Exception):
    """The message says who."""


@dataclass(slots=True, kw_only=True)
class Pass:
    """What one pass did."""

    shard: ShardName
    # Days without jobs are not told: they go, and that is all.
    turned_cold: list[Aged] = field(default_factory=list[Aged])
    # Those that an earlier pass had written are not told again.
    exported: list[Exported] = field(default_factory=list["Exported"])
    dropped: list[Aged] = field(default_factory=list[Aged])
    dedup_keys: int = 0
    jobs_expired: int = 0
    dead_jobs_cancelled: int = 0
    # That were set aside for a legal hold, which has ended.
    released_jobs_dropped: int = 0
    # Orgs whose erasure somebody had begun, and came to its end.
    erased: int = 0
    # Days that others would not let go of: they are tried again.
    in_use: list[str] = field(default_factory=list[str])
    # Days that could not be exported, and why: they stay.
    not_exported: list[str] = field(default_factory=list[str])
    # Erasures that do not come to their end.
    stuck: list[str] = field(default_factory=list[str])
    # There is more to do than was done.
    more: bool = False
    seconds: float = 0.0
    # For how long enqueues and acks may have waited, at most.
    locked_s_max: float = 0.0

    @property
    def left_something(self) -> bool:
        """To the next pass."""
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
        did = [
            _what(self.turned_cold, "turned cold"),
            _what(self.exported, "exported"),
            _what(self.dropped, "dropped"),
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
        said = "; ".join(part for part in did if part) or "nothing was due"
        locked = f", locked for {self.locked_s_max * 1000:.1f} ms at most" if self.turned_cold else ""
        return f"shard {self.shard!r}: {said} ({self.seconds:.2f} s{locked})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exports:
    """Where days go before they are dropped, and as whose."""

    place: Place
    cluster: str
    candidate: Candidate


async def pass_over(
    entry: ShardEntry, database: Database, settings: Settings, *, cluster: str, digest: str, stop: asyncio.Event
) -> Pass:
    """Does what is due, as far as it can be done now, or until soon after `stop` is set. Raises AnotherArchives,
    ShardUnavailable."""
    async with candidacy(entry.dsn, digest, office=ARCHIVER, shard=entry.name) as candidate:
        if not await candidate.lead():
            who = await candidate.leader() or "it has just ended"
            raise AnotherArchives(f"shard {entry.name!r}: another archiver is at work: {who}")
        began_s = time.monotonic()
        done = Pass(shard=entry.name)
        exports = (
            None if settings.export is None else _Exports(place=settings.export, cluster=cluster, candidate=candidate)
        )
        await _days(done, database, exports, stop)
        done.dedup_keys = await _all(done, partial(archiving.expire_dedup, database), stop)
        done.jobs_expired = await _all(done, partial(archiving.expire_waiting, database), stop)
        done.dead_jobs_cancelled = await _all(
            done, partial(archiving.retire_dead, database, days=settings.dead_days), stop
        )
        done.released_jobs_dropped = await _all(done, partial(archiving.expire_released, database), stop)
        for erasure in await erasing.unfinished(database):
            try:
                await _all(done, partial(erasing.go_on, database, erasure), stop)
            except Misconfigured as error:
                done.stuck.append(str(error))
            else:
                done.erased += not done.more
        done.more = done.more or stop.is_set()
        done.seconds = time.monotonic() - began_s
        return done


async def _days(done: Pass, database: Database, exports: _Exports | None, stop: asyncio.Event) -> None:
    for over in await archiving.days_over(database):
        if not stop.is_set():
            await _tried(done, done.turned_cold, archiving.turn_cold(database, over))
    for past in await archiving.days_past(database):
        if not stop.is_set():
            await _drop(done, database, past, exports, stop)
    if not stop.is_set():
        try:
            await archiving.drop_past_ids(database)
        except InUse as error:
            done.in_use.append(str(error))


async def _drop(done: Pass, database: Database, day: Day, exports: _Exports | None, stop: asyncio.Event) -> None:
    exported: Mapping[OrgId, int] | None = None
    try:
        # Of retention 0 nothing is to be kept, and so nothing elsewhere.
        if exports is not None and day.retention:
            exported = await _export(done, database, day, exports, stop)
            if exported is None:
                return
        await _tried(done, done.dropped, archiving.drop(database, day, exported=exported))
    except (ExportFailed, NotExported) as error:
        done.not_exported.append(f"{day.name} stays: {error}")


async def _export(
    done: Pass, database: Database, day: Day, exports: _Exports, stop: asyncio.Event
) -> Mapping[OrgId, int] | None:
    """How many jobs each org has in the export; None: it was told to stop. Raises ExportFailed."""
    try:
        # Large, and needed by few.
        from archiver import exporting
    except ModuleNotFoundError as error:
        raise NotInstalled(error.name) from error
    files = await exporting.open_files(exports.place)
    try:
        one = await exporting.export_day(files, database, day, cluster=exports.cluster, stop=stop)
    except exporting.Stopped:
        return None
    if one.written and one.jobs:
        done.exported.append(one)
    # That took its time. Another archiver, were there one by now, might be about to write the day anew.
    await exports.candidate.lead()
    await exporting.still_there(files, one, day, database.name)
    return one.rows_by_org


async def _tried(done: Pass, aged: list[Aged], step: Awaitable[Aged]) -> None:
    try:
        one = await step
    except InUse as error:
        done.in_use.append(str(error))
    else:
        if aged is done.turned_cold:
            # Who enqueues or acks does not look at cold days, but for ids of then.
            done.locked_s_max = max(done.locked_s_max, one.locked_s)
        if one.jobs:
            aged.append(one)


async def _all(done: Pass, step: Callable[[], Awaitable[int]], stop: asyncio.Event) -> int:
    """Takes a step again and again, until it finds nothing more to do, or for as long as a pass may."""
    count, give_up_s = 0, time.monotonic() + _PASS_S_MAX
    while not stop.is_set():
        some = await step()
        count += some
        if not some:
            break
        if time.monotonic() > give_up_s:
            done.more = True
            break
    return count


def _what(aged: Sequence[Aged | Exported], how: str) -> str:
    if not aged:
        return ""
    jobs, size = sum(each.jobs for each in aged), sum(each.bytes for each in aged)
    return f"{len(aged)} day(s) {how}: {jobs:,} job(s), {size_text(size)}"
