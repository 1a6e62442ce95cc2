"""The list of all orgs, merged from the lists of the shards. Each org is listed once, and in order, even while the org
moves."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.fleet import Fleet
from router.route.all_orgs import OrgsPage, list_orgs
from shard.admin.org_figures import OrgFigures, OrgPage, OrgSort, Place, SomeFigures, WantedOrgs, pack, unpack
from shard.errors import BadPageToken, ShardUnavailable
from shard.placement.slots import Placement
from shard.vocabulary import OrgId, ShardName

SHARDS = tuple(map(ShardName, ("s1", "s2", "s3")))
AGE_US = {"s1": 5, "s2": 7, "s3": 1}


class Shard:
    """A shard whose orgs have these figures. This class replaces the handle of the shard and the administration of the
    shard."""

    def __init__(self, name: ShardName, orgs: dict[OrgId, OrgFigures]) -> None:
        self.name, self.orgs, self.away = name, orgs, False
        self.queue_admin = self

    def require_up(self) -> Shard:
        if self.away:
            raise ShardUnavailable(self.name, "it is away")
        return self

    async def list_orgs(self, wanted: WantedOrgs, *, after: Place, page_size: int) -> OrgPage:
        found = [one for one in self.orgs.values() if wanted.search in one.org]
        found.sort(key=lambda one: Place(one.figure(wanted.sort), one.org).key)
        behind = [one for one in found if Place(one.figure(wanted.sort), one.org).key > after.key]
        return OrgPage(behind[:page_size], len(behind) > page_size)

    async def org_figures(self, orgs: list[OrgId]) -> SomeFigures:
        return SomeFigures({org: self.orgs[org] for org in orgs if org in self.orgs}, AGE_US[self.name])


class Shards:
    """The part of the fleet that list_orgs needs."""

    def __init__(self, orgs: dict[str, dict[str, tuple[Any, ...]]]) -> None:
        """`orgs`: the figures of each org on each shard that reads it."""
        self._reads = {org: tuple(map(ShardName, parts)) for org, parts in orgs.items()}
        by_shard: dict[str, dict[OrgId, OrgFigures]] = defaultdict(dict)
        for org, parts in orgs.items():
            for shard, figures in parts.items():
                by_shard[shard][OrgId(org)] = OrgFigures(OrgId(org), *figures)
        self.members = {name: Shard(name, by_shard[name]) for name in SHARDS}

    def shards(self) -> dict[ShardName, Shard]:
        return self.members

    def placed(self, name: ShardName) -> Shard:
        return self.members[name]

    member = placed

    def placement(self, org: OrgId) -> Placement:
        reads = self._reads[org]
        return Placement(writes=reads[-1:], reads=reads, epoch=1)


def page(shards: Shards, sort: OrgSort, token: str = "", *, size: int = 100, search: str = "") -> OrgsPage:
    wanted = WantedOrgs(search, sort, 0)
    fleet = cast("Fleet", cast("Any", shards))
    return asyncio.run(list_orgs(fleet, wanted, shard=None, page_size=size, page_token=token))


def everything(shards: Shards, sort: OrgSort, *, size: int, search: str = "") -> list[OrgFigures]:
    found: list[OrgFigures] = []
    token, pages = "", 0
    while token or not pages:
        one = page(shards, sort, token, size=size, search=search)
        found += [figures for figures, _ in one.orgs]
        token, pages = one.next_page_token, pages + 1
        assert pages <= 100, "the pages do not end"
    return found


def test_a_shard_that_is_away_is_named_and_the_others_are_listed() -> None:
    shards = Shards({"a": {"s1": (0, 1, 0, 0, 9)}, "b": {"s2": (0, 2, 0, 0, None)}})
    shards.members[SHARDS[1]].away = True
    found = page(shards, OrgSort.BACKLOG)
    assert ([one.org for one, _ in found.orgs], found.unavailable) == (["a"], ["s2"])
    assert found.age_us == 5
    for member in shards.members.values():
        member.away = True
    with pytest.raises(ShardUnavailable):
        page(shards, OrgSort.BACKLOG)


def test_a_token_of_another_order_or_a_forged_one_is_refused() -> None:
    assert unpack(pack(OrgSort.DEAD, Place(7, "a")), OrgSort.DEAD) == Place(7, "a")
    for token in (
        pack(OrgSort.BACKLOG, Place(7, "a")),
        pack(OrgSort.DEAD, Place(2**63, "a")),
        pack(OrgSort.DEAD, Place(7, "a\0")),
        pack(OrgSort.DEAD, Place(7, "\ud800")),
        pack(OrgSort.DEAD, Place(7, "")),
        pack(OrgSort.DEAD, Place(True, "a")),
        "!",
        "bnVsbA==",
    ):
        with pytest.raises(BadPageToken):
            unpack(token, OrgSort.DEAD)


def test_an_org_that_moves_stands_where_its_larger_part_does_with_the_sum_of_both() -> None:
    shards = Shards(
        {
            "moving": {"s1": (1, 2, 3, 4, 5, 6, 7, None), "s2": (10, 20, 30, 40, 50, 60, 70, 80)},
            "larger": {"s3": (0, 31, 0, 0, None)},
            "smaller": {"s1": (0, 29, 0, 0, None)},
        }
    )
    (one, _), (two, where), (three, _) = page(shards, OrgSort.BACKLOG).orgs
    assert [one.org, two.org, three.org] == ["larger", "moving", "smaller"]
    assert (tuple(two), where) == (("moving", 11, 22, 33, 44, 50, 66, 77, 80), ["s1", "s2"])


FIGURE = st.integers(0, 3)
FIGURES = st.tuples(FIGURE, FIGURE, FIGURE, FIGURE, st.none() | FIGURE, FIGURE, FIGURE, st.just(1))
PARTS = st.dictionaries(st.sampled_from(SHARDS), FIGURES, min_size=1, max_size=2)


@given(
    orgs=st.dictionaries(st.text("abc", min_size=1, max_size=3), PARTS, max_size=20),
    sort=st.sampled_from(OrgSort),
    size=st.integers(1, 7),
    search=st.sampled_from(["", "a"]),
)
def test_every_org_is_listed_once_in_order_whatever_the_pages(
    orgs: dict[str, dict[str, tuple[Any, ...]]], sort: OrgSort, size: int, search: str
) -> None:
    listed = everything(Shards(orgs), sort, size=size, search=search)
    places: dict[str, tuple[int, str]] = {}
    for org, parts in orgs.items():
        if search in org:
            largest = max(OrgFigures(OrgId(org), *part).figure(sort) for part in parts.values())
            places[org] = (-largest, org)
    assert [one.org for one in listed] == sorted(places, key=lambda org: places[org])
    for one in listed:
        figures = list(orgs[one.org].values())
        assert one[1:5] == tuple(sum(column) for column in zip(*[part[:4] for part in figures], strict=True))
        assert one.oldest_ready_age_us == max((part[4] for part in figures if part[4] is not None), default=None)
