"""Computes when passes are due: at an interval, or at the times of a cron expression in a time zone. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

_INTERVAL = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Created by `parse`."""

    text: str
    # None: `text` is a cron expression, read in `zone`.
    interval: timedelta | None
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str, *, zone: ZoneInfo) -> Schedule:
        """Parses an interval such as 90s, 10m, 1h or 1d, or a cron expression of five fields. Raises ValueError with a
        message that says what is wrong."""
        found = _INTERVAL.fullmatch(text)
        if found is None:
            try:
                next(CronSim(text, datetime.now(zone)))
            except CronSimError as error:
                raise ValueError(
                    f"{text!r} is neither an interval, such as 10m, nor a cron expression, such as "
                    f"'*/10 * * * *': {error}"
                ) from error
            return cls(text=text, interval=None, zone=zone)
        interval = timedelta(**{_UNITS[found[2]]: int(found[1])})
        if not interval:
            raise ValueError(f"{text!r} is no interval: the shortest is 1s")
        return cls(text=text, interval=interval, zone=zone)

    def after(self, moment: datetime) -> datetime:
        """Returns the next time after `moment`, in UTC. `moment` must have a time zone."""
        if self.interval is not None:
            return (moment + self.interval).astimezone(UTC)
        return next(CronSim(self.text, moment.astimezone(self.zone))).astimezone(UTC)
