"""Combining the answers of several shards about one org."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.route import by_id
from router.route.by_org import ask_readers, change_readers, list_readers, summed
from router.route.work import WorkCounts
from shard.admin.job_pages import Key, Page, Wanted, merged, pack, unpack
from shard.admin.queue_admin import Chunk, LeavingCounts, QueueCounts
from shard.errors import QueueExists, ShardUnavailable, TooManyWaiting, UnknownQueue
from shard.job_record import JobRecord
from shard.placement.slots import Placement
from shard.vocabulary import Answer, JobId, JobState, Micros, OrgId, QueueName, ShardName
from windrow.ids import uuid7

ORG, QUEUE = OrgId("acme"), QueueName("mail")
WANTED = Wanted(org=ORG, queue=QUEUE, state=JobState.DEAD)


class Shards:
    """A fleet whose shards answer, or raise errors, as the test says."""

    def __init__(self, **says: object) -> None:
        self.says: Mapping[str, object] = says

    def placement(self, _: OrgId) -> Placement:
        names = tuple(map(ShardName, self.says))
        return Placement(writes=names[-1:], reads=names, epoch=1)

    async def is_current(self, _: OrgId, placement: Placement) -> bool:
        return placement.epoch == 1

    def placed(self, name: str) -> _Shard:
        return _Shard(self.says[name])


class _Shard:
    def __init__(self, says: object) -> None:
        self._says = says

    def require_up(self) -> _Shard:
        return self

    def require_writable(self) -> _Shard:
        return self

    @property
    def queue_admin(self) -> _Shard:
        return self

    async def has_work(self, *_: object) -> object:
        return await self.say()

    async def say(self, *_: object) -> object:
        if isinstance(self._says, Exception):
            raise self._says
        return self._says


def fleet(**says: object) -> Fleet:
    return cast("Fleet", Shards(**says))


async def say(member: ShardHandle) -> object:
    return await cast("_Shard", member).say()


def away(name: str) -> ShardUnavailable:
    return ShardUnavailable(ShardName(name), "gone")


UNKNOWN = UnknownQueue(ORG, QUEUE)
BUSY = TooManyWaiting("the shard is behind")


@pytest.mark.parametrize(
    ("says", "raised"),
    [
        ({"a": away("a")}, ShardUnavailable),
        ({"a": away("a"), "b": away("b")}, ShardUnavailable),
        ({"a": UNKNOWN}, UnknownQueue),
        ({"a": UNKNOWN, "b": UNKNOWN}, UnknownQueue),
        # The shard that did not answer may know the queue.
        ({"a": UNKNOWN, "b": away("b")}, ShardUnavailable),
        ({"a": away("a"), "b": UNKNOWN}, ShardUnavailable),
        ({"a": BUSY}, TooManyWaiting),
        ({"a": UNKNOWN, "b": BUSY}, TooManyWaiting),
        # If one shard refuses the call, the call fails although another shard has answered.
        ({"a": 1, "b": QueueExists(ORG, QUEUE)}, QueueExists),
    ],
)
async def test_where_nobody_answers_the_call_fails(says: dict[str, object], raised: type[Exception]) -> None:
    with pytest.raises(raised):
        await ask_readers(fleet(**says), ORG, say)


async def test_the_answers_are_combined_and_silent_shards_named() -> None:
    asked = await ask_readers(fleet(a=1, b=away("b"), c=UNKNOWN, d=4), ORG, say)
    assert (asked.answers, asked.unavailable) == ([("a", 1), ("d", 4)], ["b"])


async def test_a_busy_shard_is_named_like_a_silent_one_and_the_others_are_read() -> None:
    asked = await ask_readers(fleet(a=1, b=BUSY, c=4), ORG, say)
    assert (asked.answers, asked.unavailable) == ([("a", 1), ("c", 4)], ["b"])

    async def look_up(member: ShardHandle, _: Sequence[int]) -> Mapping[int, str]:
        return cast("Mapping[int, str]", await say(member))

    found = await by_id.find(fleet(a=BUSY, b={0: "here"}), ORG, [JobId(numbered(1)), JobId(numbered(2))], look_up)
    assert (found.answers, found.unavailable) == ({0: "here"}, ["a"])
    assert await WorkCounts(fleet(a=BUSY, b=True)).any(ORG, QUEUE)
    with pytest.raises(TooManyWaiting):
        await WorkCounts(fleet(a=BUSY, b=False)).any(ORG, QUEUE)


def numbered(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012}"


class Listing:
    """Lists the numbers of jobs in descending order, two per page, for each shard."""

    def __init__(self, page_size: int = 2) -> None:
        self.page_size = page_size
        self.silent: list[str] = []

    async def page(self, member: ShardHandle, token: str) -> Page:
        says = cast("list[int]", await cast("_Shard", member).say())
        below = int(str(unpack(token, newest_first=True)[0])[-12:]) if token else 10**9
        found = [one for one in sorted(says, reverse=True) if one < below]
        keys: list[Key] = [(numbered(one),) for one in found[: self.page_size]]
        return Page(
            jobs=[cast("JobRecord", SimpleNamespace(id=key[0])) for key in keys],
            keys=keys,
            until=keys[-1] if len(found) > self.page_size else None,
        )

    async def all(self, shards: Fleet) -> list[tuple[str, int]]:
        """Returns all pages: each job, and the shard that it came from."""
        found: list[tuple[str, int]] = []
        token = ""
        while True:
            listed = await list_readers(shards, WANTED, self.page, page_size=self.page_size, page_token=token)
            assert len(listed.jobs) <= self.page_size
            found += [(one.shard, int(one.job.id[-12:])) for one in listed.jobs]
            self.silent += listed.unavailable
            if listed.until is None:
                return found
            token = pack(*listed.until)


async def test_the_jobs_of_several_shards_are_one_list_newest_first() -> None:
    three = fleet(c=[6, 1], a=[9, 8, 7, 2], b=[])
    assert await Listing().all(three) == [("a", 9), ("a", 8), ("a", 7), ("c", 6), ("a", 2), ("c", 1)]
    assert await Listing().all(fleet(a=[])) == []
    half = Listing()
    assert await half.all(fleet(a=[5, 3, 1], b=away("b"), c=[4])) == [("a", 5), ("c", 4), ("a", 3), ("a", 1)]
    assert half.silent == ["b", "b"]
    assert await Listing().all(fleet(a=UNKNOWN, b=[1])) == [("b", 1)]
    for nobody in ({"a": away("a"), "b": UNKNOWN}, {"a": away("a")}):
        with pytest.raises(ShardUnavailable):
            await Listing().all(fleet(**nobody))
    with pytest.raises(UnknownQueue):
        await Listing().all(fleet(a=UNKNOWN))


async def test_a_job_that_two_shards_know_comes_once_as_the_later_one_has_it() -> None:
    assert await Listing().all(fleet(a=[5, 4, 3], b=[5, 3, 2])) == [("b", 5), ("a", 4), ("b", 3), ("b", 2)]


def test_a_page_ends_where_one_shard_has_looked_no_further() -> None:
    def of(*numbers: int, until: int | None) -> Page:
        keys: list[Key] = [(numbered(one),) for one in numbers]
        jobs = [cast("JobRecord", SimpleNamespace(id=key[0])) for key in keys]
        return Page(jobs=jobs, keys=keys, until=None if until is None else (numbered(until),))

    a, b = ShardName("a"), ShardName("b")
    jobs, until = merged([(a, of(9, 2, until=None)), (b, of(until=5))], page_size=9, newest_first=True)
    assert ([one.job.id for one in jobs], until) == ([numbered(9)], (numbered(5),))
    jobs, until = merged([(a, of(until=7)), (b, of(until=5))], page_size=9, newest_first=True)
    assert (jobs, until) == ([], (numbered(7),))


def counts(queue: str, **more: int | None) -> QueueCounts:
    whole: dict[str, int | None] = dict.fromkeys(QueueCounts._fields[1:8], 0)
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


def test_what_is_on_its_way_is_counted_once() -> None:
    chunk = Chunk(7, 2)
    leaving = LeavingCounts(
        blocked=1, scheduled=1, ready=2, dead=3, oldest_ready_age_us=9, next_due=Micros(60), chunk=chunk
    )
    source = [counts("a", ready=1)._replace(leaving=leaving, chunk=chunk)]
    also = counts("a", blocked=1, scheduled=1, ready=3, dead=3, oldest_ready_age_us=9, next_due=60)
    before = [counts("b")._replace(chunk=Chunk(7, 1)), counts("c")._replace(chunk=None)]
    assert summed([source, before]) == [also, counts("b"), counts("c")]
    # The chunk of an earlier move has no effect on the sums.
    assert summed([source, [counts("b")._replace(chunk=Chunk(6, 9))]]) == [also, counts("b")]
    # The target has imported the chunk, so its jobs are counted there.
    taken = [counts("a", scheduled=1, ready=2, dead=3)._replace(chunk=chunk)]
    assert summed([source, taken]) == [counts("a", scheduled=1, ready=3, dead=3)]


async def test_what_was_asked_by_a_placement_that_is_in_force_no_more_is_asked_again_by_the_new_one() -> None:
    class Moving(Shards):
        """The org has moved from a to b, and this router does not know it yet."""

        async def is_current(self, _: OrgId, placement: Placement) -> bool:
            self.says = {"b": [2, 1]}
            return placement.reads == ("b",)

    for said in (list[int](), UNKNOWN):
        assert (await ask_readers(cast("Fleet", Moving(a=said)), ORG, say)).answers == [("b", [2, 1])]
    assert await Listing().all(cast("Fleet", Moving(a=[]))) == [("b", 2), ("b", 1)]


async def test_what_was_changed_by_a_placement_that_is_in_force_no_more_is_changed_again_by_the_new_one() -> None:
    class Moving(Shards):
        """The org has moved from a to b, and this router does not know it yet."""

        async def is_current(self, _: OrgId, placement: Placement) -> bool:
            self.says = {"b": 2}
            return placement.reads == ("b",)

    async def change(member: ShardHandle, most: int) -> int:
        return min(most, cast("int", await say(member)))

    moving = cast("Fleet", Moving(a=0))
    assert await change_readers(moving, ORG, QUEUE, 9, change) == 2
    # The answer is full, so no other shard need be asked.
    assert await change_readers(fleet(a=5), ORG, QUEUE, 5, change) == 5


async def test_a_job_that_was_departing_and_is_unknown_by_then_is_not_found() -> None:
    """After the first answer, the job was deleted at the source, for example because its org was erased."""
    ids = [JobId(uuid7()), JobId(uuid7())]
    rounds = [[Answer.OK, Answer.DEPARTING], [Answer.NOT_FOUND]]

    async def act(_: ShardHandle, positions: Sequence[int]) -> list[Answer]:
        assert list(positions) == ([0, 1] if len(rounds) == 2 else [1])
        return rounds.pop(0)

    assert await by_id.decide(fleet(a=None), ORG, ids, act) == [Answer.OK, Answer.NOT_FOUND]
