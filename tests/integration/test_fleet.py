"""A fleet whose members come and go: nothing of those that have gone is left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator

import pytest

from embedded import Cluster as Server
from router.fleet import Fleet
from router.member import Member
from shard.cluster import Cluster, parse_cluster
from shard.errors import ShardUnavailable
from shard.vocabulary import OrgId, ShardName
from tests.jobs import lease_jobs, some_jobs
from tests.postgres import frozen

PATIENCE_S = 30.0
S1, S2 = ShardName("s1"), ShardName("s2")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("fleet", ephemeral=True) as started:
        yield started


def cluster_of(server: Server, empty_dsn: str, second: str | None) -> Cluster:
    """s1 on the server of every test, s2 on this module's own; None: there is no s2."""
    text = f"[[shard]]\nname = 's1'\ndsn = '''{empty_dsn}'''\n"
    if second is not None:
        text += f"[[shard]]\nname = 's2'\ndsn = '''{server.dsn}'''\n{second}\n"
    return parse_cluster(text, source="test")


@contextlib.asynccontextmanager
async def opened(cluster: Cluster) -> AsyncGenerator[Fleet, None]:
    fleet, ready = Fleet(cluster, connections_per_shard=2), asyncio.Event()
    running = asyncio.create_task(fleet.run(ready))
    try:
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        yield fleet
    finally:
        running.cancel()
        await asyncio.wait({running})


async def until(condition: Callable[[], object]) -> None:
    """Waits for a condition that has no signal of its own."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


async def up(fleet: Fleet) -> Member:
    await asyncio.wait_for(fleet.shards()[S2].up.wait(), PATIENCE_S)
    return fleet.member(S2)


async def test_of_a_shard_that_has_gone_no_task_is_left(server: Server, empty_dsn: str) -> None:
    alone, both = cluster_of(server, empty_dsn, None), cluster_of(server, empty_dsn, "weight = 0")
    async with opened(alone) as fleet:
        before = asyncio.all_tasks()
        for _ in range(3):
            await fleet.change(both)
            member = await up(fleet)
            assert asyncio.all_tasks() > before
            call = member.store.get(OrgId("o"), [], include_payload=False)
            await fleet.change(alone)
            assert S2 not in fleet.shards()
            assert await call == []
            await until(lambda: asyncio.all_tasks() <= before)
            with pytest.raises(ShardUnavailable, match="the cluster file has changed"):
                member.to_look_at()
            with pytest.raises(ShardUnavailable, match="has closed its connections"):
                await member.store.enqueue(some_jobs(OrgId("o"), 1))
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_shard_that_says_nothing_can_be_switched_off(server: Server, empty_dsn: str) -> None:
    both, off = (cluster_of(server, empty_dsn, f'weight = 0\nstate = "{state}"') for state in ("active", "off"))
    async with opened(off) as fleet:
        before = asyncio.all_tasks()
        await fleet.change(both)
        member = await up(fleet)
        pid = server.pid
        assert pid is not None
        with frozen(pid):
            stuck = asyncio.create_task(lease_jobs(member.store, OrgId("o")))
            await asyncio.sleep(0.1)
            await fleet.change(off)
            with pytest.raises(ShardUnavailable, match="its state is off"):
                fleet.member(S2)
            with pytest.raises(ShardUnavailable):
                await asyncio.wait_for(stuck, PATIENCE_S)
            await until(lambda: asyncio.all_tasks() <= before)
        await fleet.change(both)
        await up(fleet)


async def test_a_dsn_that_changes_while_it_is_being_proved_is_gone_over_to(
    server: Server, empty_dsn: str, fresh_dsn: str
) -> None:
    both = cluster_of(server, empty_dsn, "weight = 0")
    text_of = {"wrong": fresh_dsn, "right": f"{server.dsn}?application_name=other"}

    def with_dsn(which: str) -> Cluster:
        return parse_cluster(
            f"[[shard]]\nname = 's1'\ndsn = '''{empty_dsn}'''\n"
            f"[[shard]]\nname = 's2'\ndsn = '''{text_of[which]}'''\nweight = 0\n",
            source="test",
        )

    async with opened(both) as fleet:
        member = await up(fleet)
        await fleet.change(with_dsn("wrong"))
        await until(lambda: "leads to the database of shard 's1'" in member.trouble)
        await fleet.change(with_dsn("right"))
        await until(lambda: member.dsn == text_of["right"])
        assert (fleet.member(S2), member.trouble) == (member, "")
        # And back, before it has been proved.
        await fleet.change(with_dsn("wrong"))
        await fleet.change(with_dsn("right"))
        assert (fleet.member(S2), member.trouble, member.dsn) == (member, "", text_of["right"])
