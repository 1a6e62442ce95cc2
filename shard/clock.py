"""Whether a shard's clock was set back, by what the same clock has shown before.

Jobs are found again by the time at which they finished, so that a clock that goes back can hide a finished job: sent
again, it would run again. Two things bound that. A job finishes at the latest time that is recorded, if that is later
than now (the statements see to it). And a shard whose clock is more than a minute behind that time takes no calls until
the clock has caught up, or an operator says that it is right (`accept`). No other clock is compared with it.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from shard import statements
from shard.database import Database
from shard.errors import ClockSetBack
from shard.vocabulary import Micros
from shard.words import span_text

_log = logging.getLogger(__name__)

# A smaller step is harmless: jobs are looked for from two hours before they were made.
BEHIND_S_MAX = 60.0


class ShardClock:
    """What one router knows of the clock of one shard. Everything that it asks of the shard raises ShardUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._shard = database.name
        # Why the shard takes no calls. None: its clock is right, as far as this router knows.
        self.trouble: str | None = None

    async def record(self) -> None:
        """Records what the clock shows, and compares it with what was recorded before."""
        ((now, latest, _),) = await self._database.run(statements.RECORD_TIME, {})
        behind_s = (latest - now) / 1_000_000
        if behind_s <= BEHIND_S_MAX:
            if self.trouble is not None:
                _log.warning("the clock of shard %r is right again; it takes calls", self._shard)
            self.trouble = None
            return
        said = self.trouble is not None
        self.trouble = (
            f"its clock was set back: it shows {time_text(now)}, and has shown {time_text(latest)}, which is "
            f"{span_text(behind_s)} later. It takes no calls until its clock has caught up, or until "
            f"`windrow shards accept-clock {self._shard}` says that its clock is right"
        )
        if not said:
            _log.error("shard %r: %s", self._shard, self.trouble)

    def check(self) -> None:
        """Raises ClockSetBack."""
        if self.trouble is not None:
            raise ClockSetBack(self._shard, self.trouble)


async def accept(database: Database) -> tuple[Micros, Micros]:
    """From now on the shard's clock is right, whatever it has shown before. Answers what it shows, and the latest time
    that was recorded."""
    ((now, latest, _),) = await database.run(statements.ACCEPT_CLOCK, {})
    return Micros(now), Micros(latest)


def time_text(micros: int) -> str:
    return f"{datetime.fromtimestamp(micros // 1_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
