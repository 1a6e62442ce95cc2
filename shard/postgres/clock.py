"""Notices when a shard's clock was set back, by comparing it with the latest time that it has shown before.

Finished jobs are looked up by the time at which they finished. If the clock is set back, a finished job may not be
found. Then it would run again if it is enqueued again. Two rules prevent that. First, a job never finishes before the
latest recorded time (the statements use the later of that time and now()). Second, a shard whose clock is more than a
minute behind that time takes no calls until the clock has caught up, or an operator confirms that the clock is right
(`accept`). These rules compare the clock with no other clock.

If the shard's clock was set forward, everything that is kept for a limited time seems old. So before a process
permanently deletes what is old by this clock, the process compares this clock with the clock of its own machine
(`check_difference`). The machine's clock can only prevent the deletion: it never decides what is old.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

from shard.errors import ClocksDiffer, ClockSetBack
from shard.formatting import span_text
from shard.postgres import statements
from shard.postgres.pool import Database
from shard.vocabulary import Micros

_log = logging.getLogger(__name__)

# If a clock is set back by less than this, no harm is done: lookups begin two hours before a job was made.
BEHIND_S_MAX = 60.0
# By how much the clocks of a shard and of another machine may differ. Synchronised clocks differ by far less, and
# retentions are much longer.
DIFFERENCE_S_MAX = 3600.0


class ShardClock:
    """What one router knows about the clock of one shard."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._shard = database.name
        # Why the shard takes no calls. None: this router knows of no problem with the clock.
        self.trouble: str | None = None

    async def record(self) -> None:
        """Records the clock's time, and compares it with the latest time recorded before. Raises ShardUnavailable."""
        ((now, latest, _),) = await self._database.run(statements.RECORD_TIME, {})
        behind_s = (latest - now) / 1_000_000
        if behind_s <= BEHIND_S_MAX:
            if self.trouble is not None:
                _log.warning("the clock of shard %r is right again; it takes calls", self._shard)
            self.trouble = None
            return
        was_known = self.trouble is not None
        self.trouble = (
            f"its clock was set back: it shows {time_text(now)}, and has shown {time_text(latest)}, which is "
            f"{span_text(behind_s)} later. It takes no calls until its clock has caught up, or until "
            f"`windrow shards accept-clock {self._shard} --config FILE` says that its clock is right"
        )
        if not was_known:
            _log.error("shard %r: %s", self._shard, self.trouble)

    def check(self) -> None:
        """Raises ClockSetBack if the clock was set back."""
        if self.trouble is not None:
            raise ClockSetBack(self._shard, self.trouble)


async def accept(database: Database) -> tuple[Micros, Micros]:
    """Records that the shard's clock is right, even if it has shown later times before. Returns the clock's present
    time, and the latest time that was recorded before. Raises InDoubt, ShardUnavailable."""
    ((now, latest, _),) = await database.run(statements.ACCEPT_CLOCK, {})
    return Micros(now), Micros(latest)


async def check_difference(database: Database) -> None:
    """Raises ClocksDiffer if the shard's clock and this machine's clock differ by more than DIFFERENCE_S_MAX. Call this
    before permanently deleting something that is old by the shard's clock. Raises ShardUnavailable."""
    ((shown,),) = await database.run(statements.SHOW_TIME, {})
    here = int(time.time() * 1_000_000)
    if abs(shown - here) > DIFFERENCE_S_MAX * 1_000_000:
        raise ClocksDiffer(database.name, shows=time_text(shown), here=time_text(here))


def time_text(micros: int) -> str:
    """Formats microseconds since 1970 as a UTC time, to the second."""
    return f"{datetime.fromtimestamp(micros // 1_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
