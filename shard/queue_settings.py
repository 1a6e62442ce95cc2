"""The settings of a queue that operators may change, and the columns of windrow.queue that store them. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The settings of one queue. None: the default. In a change, None means no change."""

    # JSON, as in shard/retry_policy.py.
    retry: str | None = None
    max_attempts: int | None = None
    # How long finished jobs are kept.
    retention_days: int | None = None
    # How many jobs of one group may be leased at the same time.
    group_concurrency: int | None = None
    # A ready job of priority p is moved to priority 1 after (p - 1) times this many seconds.
    ageing_seconds: int | None = None
    # A kind of the queue's jobs is quarantined after this many crashes.
    quarantine_after: int | None = None
    paused: bool | None = None

    @classmethod
    def from_row(cls, values: Iterable[object]) -> QueueSettings:
        """Returns the settings that a statement read with {{queue_settings}} or {{effective_settings}}."""
        return cls(**dict(zip(SETTING_COLUMNS, values, strict=True)))  # type: ignore[arg-type]

    def given(self) -> dict[str, object]:
        """Returns the settings that are not the default, by name. The number 0 is not a default."""
        return {name: value for name, value in asdict(self).items() if value is not None and value is not False}


class Column(NamedTuple):
    """A column of windrow.queue that stores a setting."""

    name: str
    type: str
    default: str = "NULL"


# The columns by the settings' names. Every statement that changes, returns or copies the settings of a queue includes
# all of them (shard/postgres/sql_loader.py).
SETTING_COLUMNS: Mapping[str, Column] = {
    "retry": Column("retry", "jsonb"),
    "max_attempts": Column("max_attempts", "smallint"),
    "retention_days": Column("retention", "smallint"),
    "group_concurrency": Column("group_concurrency", "smallint"),
    "ageing_seconds": Column("ageing_seconds", "integer"),
    "quarantine_after": Column("quarantine_after", "smallint"),
    "paused": Column("paused", "boolean", default="false"),
}
# The condition under which a queue gives jobs now. Claims, hand-overs, probes and sweeps all use it. {0} is a row of
# windrow.queue.
GIVES_JOBS = "NOT {0}.paused"
