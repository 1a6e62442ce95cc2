"""What several shards say of one org, made one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest

from router.fleet import Fleet
from router.member import Member
from router.scatter import ask_readers, change_readers, list_readers, summed
from shard.books import Page, QueueCounts
from shard.errors import BadPageToken, QueueExists, ShardUnavailable, UnknownQueue
from shard.placement import Placement
from shard.records import JobRecord
from shard.vocabulary import Micros, OrgId, QueueName, ShardName

ORG, QUEUE = OrgId("acme"), QueueName("mail")


class Shards:
    """A fleet whose shards answer, or raise, what the test has them say."""

    def __init__(self, **says: object) -> None:
        self.says: Mapping[str, object] = says

    def placement(self, _: OrgId) -> Placement:
        names = tuple(map(ShardName, self.says))
        return Placement(writes=names[-1:], reads=names, epoch=1)

    def placed(self, name: str) -> _Shard:
        return _Shard(self.says[name])


class _Shard:
    def __init__(self, says: object) -> None:
        self._says = says

    def to_look_at(self) -> _Shard:
        return self

    def to_change(self) -> _Shard:
        return self

    async def say(self, *_: object) -> object:
        if isinstance(self._says, Exception):
            raise self._says
        return self._says


def fleet(**says: object) -> Fleet:
    return cast("Fleet", Shards(**says))


async def say(member: Member) -> object:
    return await cast("_Shard", member).say()


def away(name: str) -> ShardUnavailable:
    return ShardUnavailable(ShardName(name), "gone")


UNKNOWN = UnknownQueue(ORG, QUEUE)


@pytest.mark.parametrize(
    ("says", "raised"),
    [
        ({"a": away("a")}, ShardUnavailable),
        ({"a": away("a"), "b": away("b")}, ShardUnavailable),
        ({"a": UNKNOWN}, UnknownQueue),
        ({"a": UNKNOWN, "b": UNKNOWN}, UnknownQueue),
        # It may be known where nobody answers.
        ({"a": UNKNOWN, "b": away("b")}, ShardUnavailable),
        ({"a": away("a"), "b": UNKNOWN}, ShardUnavailable),
        # What a shard objects to is nobody's absence.
        ({"a": 1, "b": QueueExists(ORG, QUEUE)}, QueueExists),
    ],
)
async def test_where_nobody_answers_the_call_fails(says: dict[str, object], raised: type[Exception]) -> None:
    with pytest.raises(raised):
        await ask_readers(fleet(**says), ORG, say)


async def test_those_who_answer_are_heard_and_the_others_named() -> None:
    asked = await ask_readers(fleet(a=1, b=away("b"), c=UNKNOWN, d=4), ORG, say)
    assert (asked.answers, asked.unavailable) == ([("a", 1), ("d", 4)], ["b"])


def job(job_id: str) -> JobRecord:
    return cast("JobRecord", job_id)


async def pages(shards: Fleet) -> tuple[list[str], list[str], list[str]]:
    """Every page to the last one: the jobs, whose each page was, and who did not answer."""
    jobs, whose, silent = list[str](), list[str](), list[str]()
    token = ""

    async def ask(member: Member, inner: str) -> Page:
        says = await cast("_Shard", member).say()
        ids = cast("list[str]", says)
        at = int(inner or 0)
        return Page(jobs=[job(one) for one in ids[at : at + 2]], next_token=str(at + 2) if at + 2 < len(ids) else "")

    while True:
        page = await list_readers(shards, ORG, token, ask)
        jobs += cast("list[str]", page.page.jobs)
        whose.append(page.shard)
        silent += page.unavailable
        token = page.next_token
        if not token:
            return jobs, whose, silent


async def test_pages_go_through_one_shard_after_the_other_by_name() -> None:
    three = fleet(c=["c1", "c2"], a=["a1", "a2", "a3"], b=[])
    assert await pages(three) == (["a1", "a2", "a3", "c1", "c2"], ["a", "a", "c"], [])
    assert await pages(fleet(a=[])) == ([], ["a"], [])
    assert await pages(fleet(a=["a1"], b=away("b"), c=["c1"])) == (["a1", "c1"], ["a", "c"], ["b"])
    assert await pages(fleet(a=away("a"), b=["b1"])) == (["b1"], ["b"], ["a"])
    # The last one's turn comes when there is nothing to fail any more.
    assert await pages(fleet(a=["a1"], b=away("b"))) == (["a1"], ["a", "b"], ["b"])
    assert await pages(fleet(a=UNKNOWN, b=["b1"])) == (["b1"], ["b"], [])
    for nobody in ({"a": away("a"), "b": UNKNOWN}, {"a": away("a")}):
        with pytest.raises(ShardUnavailable):
            await pages(fleet(**nobody))


async def test_a_token_that_names_no_shard_is_refused() -> None:
    async def never(*_: object) -> Page:
        raise AssertionError("nobody is asked")

    with pytest.raises(BadPageToken):
        await list_readers(fleet(a=[]), ORG, "bogus", never)


def counts(queue: str, **more: int | None) -> QueueCounts:
    whole: dict[str, int | None] = dict.fromkeys(QueueCounts._fields[1:7], 0)
    whole |= {"oldest_ready_age_us": None, "next_due": None} | more
    return QueueCounts(queue=QueueName(queue), paused=False, **whole)  # type: ignore[arg-type]


def test_counts_are_summed_by_queue_and_times_are_the_extreme_ones() -> None:
    there = [
        counts("b", ready=1, oldest_ready_age_us=5, next_due=Micros(70)),
        counts("a", dead=2),
    ]
    here = [counts("b", ready=2, succeeded=4, oldest_ready_age_us=9, next_due=Micros(60)), counts("c")]
    assert summed([there, here, []]) == [
        counts("a", dead=2),
        counts("b", ready=3, succeeded=4, oldest_ready_age_us=9, next_due=60),
        counts("c"),
    ]


async def test_what_was_changed_by_a_placement_that_is_in_force_no_more_is_changed_again_by_the_new_one() -> None:
    class Moving(Shards):
        """The org has moved from a to b, and nobody has told."""

        async def is_current(self, _: OrgId, placement: Placement) -> bool:
            self.says = {"b": 2}
            return placement.reads == ("b",)

    async def change(member: Member, most: int) -> int:
        return min(most, cast("int", await say(member)))

    moving = cast("Fleet", Moving(a=0))
    assert await change_readers(moving, ORG, QUEUE, 9, change) == 2
    # As many as it may: nobody need be asked.
    assert await change_readers(fleet(a=5), ORG, QUEUE, 5, change) == 5
