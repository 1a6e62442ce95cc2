"""Counts the jobs of each org on one shard, for a view over all orgs.

The jobs are counted only when somebody asks for the figures and the last count is too old, because a count reads every
unfinished job (docs/decisions/0043-orgs-are-counted-when-somebody-looks.md). The hot path keeps no counts.
"""

from __future__ import annotations

import base64
import enum
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from shard.admin import statements
from shard.errors import BadPageToken
from shard.postgres.pool import Database
from shard.vocabulary import OrgId

_FIGURE_MAX = 2**63 - 1
# An org's name has no control characters. Lone surrogates are refused too: JSON can contain them, but UTF-8 cannot.
_ORG = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,128}")


class OrgSort(enum.StrEnum):
    """What orgs are sorted by: a figure, the largest first, or the name."""

    BACKLOG = "backlog"
    OLDEST = "oldest"
    DEAD = "dead"
    IN_FLIGHT = "in-flight"
    RATE = "rate"
    NAME = "name"


class OrgFigures(NamedTuple):
    """The figures of one org, in the order of the columns of list_orgs.sql and read_org_figures.sql."""

    org: OrgId
    scheduled: int
    ready: int
    leased: int
    dead: int
    # How long the oldest ready job had been ready when the jobs were counted. None: no job was ready.
    oldest_ready_age_us: int | None
    # The rates at which jobs were stored and ended between the last two counts. The rates are per thousand seconds, so
    # that they are whole numbers, which are easy to sort and to put into page tokens.
    enqueued_per_1000_s: int = 0
    ended_per_1000_s: int = 0
    # The time between the two counts. None: the jobs were counted only once, so the rates are not known.
    rates_over_us: int | None = None

    def figure(self, sort: OrgSort) -> int:
        """Returns the figure by which list_orgs.sql sorts the org."""
        match sort:
            case OrgSort.BACKLOG:
                return self.scheduled + self.ready
            case OrgSort.OLDEST:
                return -1 if self.oldest_ready_age_us is None else self.oldest_ready_age_us
            case OrgSort.DEAD:
                return self.dead
            case OrgSort.IN_FLIGHT:
                return self.leased
            case OrgSort.RATE:
                return self.enqueued_per_1000_s + self.ended_per_1000_s
            case OrgSort.NAME:
                return 0

    def plus(self, other: OrgFigures) -> OrgFigures:
        """Returns these figures combined with the figures that another shard has for the same org."""
        ages = [age for age in (self.oldest_ready_age_us, other.oldest_ready_age_us) if age is not None]
        spans = [span for span in (self.rates_over_us, other.rates_over_us) if span is not None]
        return OrgFigures(
            self.org,
            self.scheduled + other.scheduled,
            self.ready + other.ready,
            self.leased + other.leased,
            self.dead + other.dead,
            max(ages, default=None),
            self.enqueued_per_1000_s + other.enqueued_per_1000_s,
            self.ended_per_1000_s + other.ended_per_1000_s,
            max(spans, default=None),
        )


class Place(NamedTuple):
    """A place in a list of orgs: directly after an org with this figure and this name."""

    figure: int
    org: str

    @property
    def key(self) -> tuple[int, str]:
        """A sort key that puts places in the order of the list."""
        return -self.figure, self.org


START = Place(_FIGURE_MAX, "")


class WantedOrgs(NamedTuple):
    """Which orgs to list: the orgs whose names contain `search`."""

    search: str
    sort: OrgSort
    # How old the figures may be.
    max_age_us: int


class OrgPage(NamedTuple):
    orgs: list[OrgFigures]
    # Whether there are orgs after the last org of the page.
    more: bool


class SomeFigures(NamedTuple):
    orgs: dict[OrgId, OrgFigures]
    # The age of the count.
    age_us: int


async def count(database: Database, *, max_age_us: int) -> None:
    """Counts the jobs of every org, unless they were counted within `max_age_us`. Raises ShardUnavailable."""
    await database.run(statements.COUNT_ORGS, {"max_age_us": max_age_us})


async def page(database: Database, wanted: WantedOrgs, *, after: Place, page_size: int) -> OrgPage:
    """Returns the orgs that follow a place in the list, with the figures of the last count. Raises ShardUnavailable."""
    rows = await database.run(
        statements.LIST_ORGS,
        {
            "search": wanted.search,
            "sort": wanted.sort.value,
            "after_figure": after.figure,
            "after_org": after.org,
            "rows": page_size + 1,
        },
    )
    # The last column is the figure by which the rows are sorted.
    return OrgPage([OrgFigures._make(row[:-1]) for row in rows[:page_size]], len(rows) > page_size)


async def read(database: Database, orgs: Sequence[OrgId]) -> SomeFigures:
    """Returns the figures of the given orgs that live on this shard, from the last count, and the age of that count.
    Raises ShardUnavailable."""
    rows = await database.run(statements.READ_ORG_FIGURES, {"orgs": list(orgs)})
    figures = [OrgFigures._make(row[:-1]) for row in rows if row[0] is not None]
    return SomeFigures({found.org: found for found in figures}, max((int(row[-1]) for row in rows), default=0))


def pack(sort: OrgSort, place: Place) -> str:
    """Returns the page token of a place in a list with this order."""
    return base64.urlsafe_b64encode(json.dumps([sort.value, *place]).encode()).decode()


def unpack(token: str, sort: OrgSort) -> Place:
    """Returns the place that a page token names; an empty token names the start. A caller may have forged the token.
    Raises BadPageToken."""
    if not token:
        return START
    try:
        parts: Any = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, RecursionError) as error:
        raise BadPageToken(token) from error
    if not isinstance(parts, list) or len(found := cast("list[object]", parts)) != 3:
        raise BadPageToken(token)
    of_sort, figure, org = found
    if (
        of_sort != sort.value
        or not isinstance(figure, int)
        or isinstance(figure, bool)
        or not -1 <= figure <= _FIGURE_MAX
        or not isinstance(org, str)
        or _ORG.fullmatch(org) is None
    ):
        raise BadPageToken(token)
    return Place(figure, org)
