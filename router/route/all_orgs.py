"""Lists the orgs of all shards with their figures, one page at a time.

Each shard sorts its own orgs, and the pages of the shards are merged. An org that moves has jobs on two shards. The
larger of its two figures decides where it is listed, and the list shows the sum of the two. So a page of the list needs
one page of each shard and, for each of its few orgs that move, the figures of the org's other shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from shard.admin.org_figures import OrgFigures, OrgPage, OrgSort, Place, SomeFigures, WantedOrgs, pack, unpack
from shard.errors import NoAnswer
from shard.vocabulary import OrgId, ShardName


class OrgsPage(NamedTuple):
    # Each org, and the shards that have its jobs.
    orgs: list[tuple[OrgFigures, Sequence[ShardName]]]
    # Empty on the last page.
    next_page_token: str
    # The age of the oldest figures; None if no shard answered.
    age_us: int | None
    # The shards that did not answer.
    unavailable: list[ShardName]


class Part(NamedTuple):
    """What one shard has of an org that is on a page."""

    place: Place
    shard: ShardName
    figures: OrgFigures


async def list_orgs(
    fleet: Fleet, wanted: WantedOrgs, *, shard: ShardName | None, page_size: int, page_token: str
) -> OrgsPage:
    """Returns the next page. If `shard` is given, the page has only the orgs and the figures of this shard. Raises
    UnknownShard, BadPageToken, and NoAnswer if no shard answers."""
    after = unpack(page_token, wanted.sort)
    if shard is not None:
        fleet.member(shard)
    names = list(fleet.shards()) if shard is None else [shard]
    asked = await asyncio.gather(*(_page(fleet, name, wanted, after, page_size) for name in names))
    pages = {name: page for name, page in zip(names, asked, strict=True) if isinstance(page, OrgPage)}
    errors = {name: error for name, error in zip(names, asked, strict=True) if isinstance(error, NoAnswer)}
    if not pages:
        raise next(iter(errors.values()))
    parts, more = merged(pages, sort=wanted.sort, page_size=page_size)
    others = [] if shard is not None else [part for part in parts if len(_reads(fleet, part)) > 1]
    # Ask all these shards even if `others` is empty, because the answers also have the age of each shard's count.
    read = await asyncio.gather(*(_figures(fleet, name, [part.figures.org for part in others]) for name in pages))
    counted = {name: some for name, some in zip(pages, read, strict=True) if some is not None}
    orgs: list[tuple[OrgFigures, Sequence[ShardName]]] = []
    for part in parts:
        reads = _reads(fleet, part)
        # Leave out a part whose shard is not among the org's reads: the org has just moved away, and the shard where it
        # lives now lists it.
        if part.shard in reads:
            known = {part.shard: part.figures}
            if shard is None:
                for name in reads:
                    if name != part.shard and name in counted and part.figures.org in counted[name].orgs:
                        known[name] = counted[name].orgs[part.figures.org]
            if part.shard == leading(known, sort=wanted.sort):
                total = part.figures
                for name, figures in known.items():
                    total = total if name == part.shard else total.plus(figures)
                orgs.append((total, [name for name in reads if name in known]))
    return OrgsPage(
        orgs,
        pack(wanted.sort, parts[-1].place) if more and parts else "",
        max((some.age_us for some in counted.values()), default=None),
        [name for name in names if name in errors or name not in counted],
    )


def merged(pages: dict[ShardName, OrgPage], *, sort: OrgSort, page_size: int) -> tuple[list[Part], bool]:
    """Merges the shards' pages, which begin at the same place, into one. Returns its parts in order, and whether more
    follow. If an org has the same figure on two shards, its two parts have the same place and are never separated."""
    parts = [
        Part(Place(figures.figure(sort), figures.org), name, figures)
        for name, page in pages.items()
        for figures in page.orgs
    ]
    parts.sort(key=lambda part: part.place.key)
    ends = [Place(page.orgs[-1].figure(sort), page.orgs[-1].org).key for page in pages.values() if page.more]
    # After the first of these ends, a shard may have orgs that it has not sent.
    within = [part for part in parts if not ends or part.place.key <= min(ends)]
    if len(within) <= page_size:
        return within, len(within) < len(parts) or bool(ends)
    last = within[page_size - 1].place
    taken = [part for part in within if part.place.key <= last.key]
    return taken, len(taken) < len(parts) or bool(ends)


def leading(known: dict[ShardName, OrgFigures], *, sort: OrgSort) -> ShardName:
    """Returns the shard that decides the place at which an org is listed. It is the shard with the largest figure; if
    several have that figure, it is the shard whose name comes first."""
    return min(known, key=lambda name: (-known[name].figure(sort), name))


async def _page(fleet: Fleet, name: ShardName, wanted: WantedOrgs, after: Place, page_size: int) -> OrgPage | NoAnswer:
    try:
        return await _up(fleet, name).queue_admin.list_orgs(wanted, after=after, page_size=page_size)
    except NoAnswer as error:
        return error


async def _figures(fleet: Fleet, name: ShardName, orgs: Sequence[OrgId]) -> SomeFigures | None:
    """Returns None if the shard does not answer."""
    try:
        return await _up(fleet, name).queue_admin.org_figures(orgs)
    except NoAnswer:
        return None


def _up(fleet: Fleet, name: ShardName) -> ShardHandle:
    return fleet.placed(name).require_up()


def _reads(fleet: Fleet, part: Part) -> Sequence[ShardName]:
    return fleet.placement(part.figures.org).reads
