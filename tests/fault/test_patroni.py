"""A shard under Patroni, with the configuration of deploy/patroni. A failed primary is replaced without an operator,
nothing acknowledged is lost (I1), and the orgs of the other shard notice nothing (I4).

`WINDROW_FAILOVERS=20` kills the primary 20 times and prints how long the shard was without service.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cli.local import in_thread
from embedded import BinariesNotFound
from proof.history import Verb
from proof.postgres import Shard, ask, open_shards
from tests.effort import trials
from tests.fault.work import Work, working
from tests.jobs import job_id, job_message
from tests.patroni import INSTALL, QUICK, Member, PatroniShard, missing_programs, patroni_shard
from tests.routers import PATIENCE_S, Routers, running_routers, stubs, write_cluster
from tests.streams import until
from windrow.v1 import admin_pb2, cluster_pb2, queue_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

# The first shard has the catalog, and only one server.
PLAIN, WATCHED = "s1", "s2"
FAILOVERS = int(os.environ.get("WINDROW_FAILOVERS", trials(1, thorough=20)))
# The timeout of a call by which a client finds out whether the shard serves it.
_LOOK_S = 1.0
_numbers = itertools.count(1)


@dataclass(kw_only=True)
class Cluster:
    plain: Shard
    watched: PatroniShard
    routers: Routers

    def org_on(self, shard: str) -> str:
        with stubs(self.routers.address) as both:
            while True:
                org = f"org-{next(_numbers)}"
                request = admin_pb2.CreateQueueRequest(org=org, queue="load")
                try:
                    found = both.admin.CreateQueue(request, timeout=PATIENCE_S).queue.shard
                except grpc.RpcError as error:
                    # A router that has just started may not have reached the shard yet.
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    continue
                if found == shard:
                    return org

    def enqueue(self, org: str, *, timeout_s: float = _LOOK_S) -> None:
        """Enqueues a job. Raises grpc.RpcError."""
        request = queue_pb2.EnqueueRequest(org=org, jobs=[job_message(id=job_id(), queue="probe", kind="work")])
        with stubs(self.routers.address) as both:
            both.queue.Enqueue(request, timeout=timeout_s)

    def serves(self, org: str) -> bool:
        try:
            self.enqueue(org)
        except grpc.RpcError:
            return False
        return True

    def health(self) -> dict[str, bool]:
        with stubs(self.routers.address) as both:
            shards = both.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S).shards
            return {one.name: one.reachable for one in shards}

    @contextlib.asynccontextmanager
    async def working(self, folder: Path) -> AsyncGenerator[Work, None]:
        """Runs load on both shards during the block. Afterwards checks that every member runs, that nothing is lost,
        and that no call for the other shard has failed."""
        resting = await asyncio.to_thread(self.org_on, PLAIN)
        org = await asyncio.to_thread(self.org_on, WATCHED)
        async with working([self.routers.address], org=org, bystanders={PLAIN: resting}, folder=folder) as work:
            yield work
            await whole(self.watched)
            await work.drain([self.plain, self.watched])
        assert await asyncio.to_thread(work.wrong, [self.plain, self.watched], self.routers.address) == []
        assert work.missing == set()
        assert work.failed([resting]) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} not installed: {INSTALL}")
    folder = tmp_path_factory.mktemp("cluster")
    async with contextlib.AsyncExitStack() as stack:
        try:
            plain = (await stack.enter_async_context(open_shards(1, replicated=False, roots={})))[PLAIN]
            # Start the programs in this thread, because they end when the thread that started them ends.
            watched = stack.enter_context(patroni_shard(WATCHED))
        except BinariesNotFound as error:
            pytest.skip(str(error))
        config = write_cluster(folder / "cluster.toml", {PLAIN: plain.direct_dsn, WATCHED: watched.dsn})
        routers = await stack.enter_async_context(in_thread(running_routers(config)))
        yield Cluster(plain=plain, watched=watched, routers=routers)


async def replaced(shard: PatroniShard, old: Member) -> None:
    # The pause between two looks is long, because each look costs Patroni some milliseconds of CPU. The other pauses in
    # this file are long for this reason, too.
    await until(lambda: asyncio.to_thread(shard.has_leader, other_than=old), "another one leads", every_s=0.2)


async def whole(shard: PatroniShard) -> None:
    await until(lambda: asyncio.to_thread(shard.is_whole), "every member runs", every_s=0.5)


async def service(cluster: Cluster, org: str) -> None:
    await until(lambda: asyncio.to_thread(cluster.serves, org), f"{org} is served", every_s=0.2)


@pytest.mark.thorough
@pytest.mark.timeout(900)
async def test_the_synchronous_standby_replaces_a_killed_primary_and_one_that_lags_does_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    probe = await asyncio.to_thread(cluster.org_on, WATCHED)
    away: list[tuple[float, float]] = []
    async with cluster.working(tmp_path) as work:
        for _ in range(FAILOVERS):
            old = cluster.watched.leader
            (synchronous,) = [member for member in cluster.watched.members if member.is_("sync")]
            (other,) = [member for member in cluster.watched.members if member not in (old, synchronous)]
            with other.lagging():
                await asyncio.to_thread(cluster.enqueue, probe, timeout_s=PATIENCE_S)
                began_s = time.monotonic()
                old.kill_postgres()
                await replaced(cluster.watched, old)
                assert cluster.watched.leader is synchronous
            await service(cluster, probe)
            away.append((began_s, time.monotonic()))
            await whole(cluster.watched)
    took_s = [end_s - began_s for began_s, end_s in away]
    print(f"service was back after {statistics.median(took_s):.1f} s (median), {max(took_s):.1f} s at most")
    if FAILOVERS > 1:
        describe_the_other_shard(work, away)


def describe_the_other_shard(work: Work, away: Sequence[tuple[float, float]]) -> None:
    seen = work.seen()
    calls = [one for one in seen.calls if one.org in work.bystanders.values() and one.verb is Verb.ENQUEUE]
    meanwhile = [one for one in calls if any(began_s <= one.began_s <= end_s for began_s, end_s in away)]
    calm = [one for one in calls if one not in meanwhile]
    for when, some in (("meanwhile", meanwhile), ("otherwise", calm)):
        p99_s = statistics.quantiles([one.took_s for one in some], n=100)[98]
        print(f"the other shard's enqueues {when}: {len(some)}, p99 {p99_s * 1000:.1f} ms")
    print(f"{len(seen.enqueues)} jobs were enqueued, {len(seen.settles)} leases settled")


async def test_a_primary_whose_patroni_was_killed_is_left_once_it_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """The old Postgres continues without its Patroni. No standby follows it, so it accepts writes but acknowledges none
    until its Patroni is started again."""
    probe = await asyncio.to_thread(cluster.org_on, WATCHED)
    async with cluster.working(tmp_path):
        old = cluster.watched.leader
        # If Patroni is started again in time, it finds its Postgres, which remains the leader.
        old.patroni.kill()
        old.start()
        await until(lambda: asyncio.to_thread(old.is_, "leader"), "it leads again", every_s=0.2)
        assert not cluster.watched.has_leader(other_than=old)
        # In its first cycle, Patroni may name a new synchronous standby. Until Patroni has named it, no standby may be
        # promoted.
        first_s = old.dcs_last_seen()
        await until(lambda: asyncio.to_thread(lambda: old.dcs_last_seen() > first_s), "its next cycle", every_s=0.2)
        await whole(cluster.watched)
        began_s = time.monotonic()
        old.patroni.kill()
        await replaced(cluster.watched, old)
        leads_s = time.monotonic()
        await service(cluster, probe)
        print(f"another one led after {leads_s - began_s:.1f} s, and served {time.monotonic() - leads_s:.1f} s later")
        assert ask(old.superuser_dsn, "SELECT pg_is_in_recovery()") == [(False,)]
        found = ask(cluster.watched.direct_dsn, f"SELECT count(*) > 0 FROM windrow.queue WHERE org = '{probe}'")
        assert found == [(True,)]
        old.start()


async def test_without_etcd_a_shard_is_served_while_its_members_reach_each_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    probe = await asyncio.to_thread(cluster.org_on, WATCHED)
    async with cluster.working(tmp_path):
        leader = cluster.watched.leader
        others = [member for member in cluster.watched.members if member is not leader]
        began_s = time.monotonic()
        cluster.watched.etcd.kill()
        await until(lambda: asyncio.to_thread(leader.is_in_failsafe_mode), "the leader asks the others", every_s=0.2)
        # Sleep until the leadership has expired in etcd, because there is no event for this that the test could await.
        await asyncio.sleep(max(0.0, began_s + QUICK["ttl"] - time.monotonic()))
        await asyncio.to_thread(cluster.enqueue, probe, timeout_s=PATIENCE_S)
        for other in others:
            other.patroni.send(signal.SIGSTOP)
        try:
            await until(lambda: cluster.health() == {PLAIN: True, WATCHED: False}, "nobody is primary", every_s=0.2)
            with pytest.raises(grpc.RpcError) as refused:
                await asyncio.to_thread(cluster.enqueue, probe, timeout_s=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            for other in others:
                other.patroni.send(signal.SIGCONT)
            cluster.watched.etcd.start()
        await service(cluster, probe)
