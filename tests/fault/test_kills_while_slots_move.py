"""kill -9 of a balancer, a Postgres or all routers at each step of a move, under load. The kill comes before the step
commits, or after the commit and before any other process knows of the commit. Nothing acknowledged is lost, nothing is
stored or run twice, the books balance (I1, I2, I3, I5), and orgs that do not use the killed process notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from cli.local import in_thread
from embedded import BinariesNotFound
from proof.history import Verb
from proof.postgres import Shard, ask, open_shards
from shard.errors import ShardUnavailable
from shard.placement import catalog, pins
from shard.placement.catalog import Catalog
from shard.placement.pins import OnShard
from shard.placement.slots import slot_of
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, ShardName
from tests.balancers import Process, balancer_process
from tests.effort import THOROUGH
from tests.fault.steps import STEPS, make_gates, shut_gate
from tests.fault.work import Work, working
from tests.routers import Routers, ending, running_routers, write_cluster
from tests.streams import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

# The first shard has the catalog.
S1, S2, S3 = SHARDS = ("s1", "s2", "s3")
# For each process that may be killed: the shards between which the org moves during the test. The shard of the catalog
# is killed in three roles: as a bystander, as the source, and as the target.
VICTIMS = {
    "balancer": (S2, S3, S2),
    "source": (S2, S3, S2),
    "target": (S2, S3, S1),
    "catalog": (S1, S2, S3),
    "routers": (S2, S3, S2),
}
_numbers = itertools.count(1)


@dataclass(kw_only=True)
class Cluster:
    """Three Postgres servers, two sets of routers, and a balancer. Only the balancer connects through proxies."""

    shards: Mapping[str, Shard]
    routers: Sequence[Routers]
    balancer: Process
    # The balancer's cluster file.
    config: Path
    catalog: Database
    known: Catalog
    processes: contextlib.ExitStack

    @property
    def addresses(self) -> list[str]:
        return [one.address for one in self.routers]

    def org_on(self, shard: str) -> str:
        """Returns a new org that lives on this shard."""
        names = (f"org-{next(_numbers)}" for _ in itertools.count())
        return next(name for name in names if self.known.slots[slot_of(OrgId(name))].writes == (shard,))

    async def wish(self, org: str, shard: str) -> None:
        """Pins the org to this shard."""

        async def wished() -> bool:
            with contextlib.suppress(ShardUnavailable):
                await pins.pin(self.catalog, OrgId(org), OnShard(ShardName(shard)))
                return True
            return False

        await until(wished, "the catalog is there")

    def have_it_looked(self) -> None:
        """Makes the balancer look for work now: changes its cluster file, and signals the change."""
        with self.config.open("a") as file:
            file.write("# changed\n")
        self.balancer.process.send_signal(signal.SIGHUP)

    async def at_rest(self, org: str, shard: str) -> None:
        read = f"SELECT p.reads FROM windrow.placement p JOIN windrow.pin USING (slot) WHERE pin.org = '{org}'"

        async def rests() -> bool:
            return await asyncio.to_thread(ask, self.shards[S1].direct_dsn, read) == [([shard],)]

        await until(rests, f"{org} is at rest on {shard}", every_s=0.1)

    @contextlib.asynccontextmanager
    async def working(self, home: str, folder: Path) -> AsyncGenerator[Work, None]:
        """Runs the load of an org that lives on this shard and has a slot of its own."""
        org = self.org_on(home)
        await self.wish(org, home)
        bystanders = {shard: self.org_on(shard) for shard in SHARDS}
        async with working(self.addresses, org=org, bystanders=bystanders, folder=folder) as work:
            yield work

    async def kill_balancer(self) -> None:
        self.balancer.process.kill()
        await asyncio.to_thread(self.balancer.process.wait)

    async def start_balancer(self) -> None:
        self.balancer = self.processes.enter_context(balancer_process(self.config))
        await self.balancer.says("leads, with cluster file")

    async def kill_postgres(self, shard: str) -> None:
        # Kill the backends too, so that no backend finishes its work.
        node = self.shards[shard].primary
        node.kill()
        await until(lambda: not node.processes(), f"{shard} has ended")

    async def kill_routers(self) -> None:
        pids = [pid for one in self.routers for pid in one.pids]
        with ending(pids):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with contextlib.AsyncExitStack() as stack:
        try:
            shards = await stack.enter_async_context(open_shards(len(SHARDS), replicated=False, roots={}))
        except BinariesNotFound as error:
            pytest.skip(str(error))
        config = write_cluster(folder / "routers.toml", {name: shard.direct_dsn for name, shard in shards.items()})
        routers = [await stack.enter_async_context(in_thread(running_routers(config))) for _ in range(2)]
        for shard in shards.values():
            make_gates(shard)
        config = write_cluster(folder / "balancer.toml", {name: shard.dsn for name, shard in shards.items()})
        processes = stack.enter_context(contextlib.ExitStack())
        balancer = processes.enter_context(balancer_process(config))
        await balancer.says("leads, with cluster file")
        database = Database(ShardName(S1), shards[S1].direct_dsn, connections=1)
        await database.open()
        stack.push_async_callback(database.close)
        yield Cluster(
            shards=shards,
            routers=routers,
            balancer=balancer,
            config=config,
            processes=processes,
            catalog=database,
            known=await catalog.read(database),
        )


@dataclass(kw_only=True)
class Journey:
    """Moves an org's slot from one shard to another and kills a process on the way."""

    cluster: Cluster
    work: Work
    source: str
    target: str

    async def take(self, step: str, victim: str, *, is_committed: bool) -> None:
        """Runs this step with a kill. `is_committed`: the kill comes after the commit, and before any other process
        knows of the commit."""
        at = self.cluster.shards[self.places[STEPS[step].place]]
        await self.work.hold_leases()
        async with shut_gate(at, step) as gate:
            await self.cluster.wish(self.work.org, self.target)
            self.cluster.have_it_looked()
            if step == "leave":
                # The step waits for leases to end.
                await self.work.ack_held()
            await gate.reached()
            if is_committed:
                async with unheard(at):
                    await gate.pass_through()
                    await self.kill(victim)
            else:
                await self.kill(victim)
                if victim == "balancer":
                    # Make the statement fail, as if it had never arrived. Otherwise the server would execute the
                    # statement of a dead process.
                    await gate.refuse()
                elif self.places.get(victim) != at.name:
                    await gate.open()
        await self.revive(victim)
        if step != "leave":
            await self.work.ack_held()
        await self.cluster.at_rest(self.work.org, self.target)

    @property
    def places(self) -> Mapping[str, str]:
        return {"catalog": S1, "source": self.source, "target": self.target}

    async def kill(self, victim: str) -> None:
        if victim in self.places:
            await self.cluster.kill_postgres(self.places[victim])
        elif victim == "routers":
            await self.cluster.kill_routers()
        else:
            await self.cluster.kill_balancer()

    async def revive(self, victim: str) -> None:
        if victim in self.places:
            await self.cluster.shards[self.places[victim]].primary.start()
        elif victim == "balancer":
            await self.cluster.start_balancer()
        # Routers are restarted automatically.


@contextlib.asynccontextmanager
async def unheard(shard: Shard) -> AsyncGenerator[None, None]:
    """During the block the proxy drops the shard's answers."""
    (proxy,) = shard.entrance.proxies
    proxy.hold()
    try:
        yield
    finally:
        proxy.cut_all()
        proxy.let_go()


def assert_all_is_well(cluster: Cluster, work: Work) -> None:
    assert work.wrong(list(cluster.shards.values()), cluster.addresses[0]) == []
    assert work.missing == set()
    # The clients of this org retry, so they see no error.
    assert work.failed([work.org]) == []
    for log in cluster.config.parent.glob("balancer-*.log"):
        assert re.findall("Traceback|.* cannot go on.*|.* ERROR .*", log.read_text()) == []


def kills() -> Iterator[tuple[str, str]]:
    """Yields which process is killed at which step. A thorough run kills each process at each step. Any other run kills
    the balancer at each step, and each other process once; a database is killed at a step that this database
    executes."""
    others = {"close": "routers", "switch": "catalog", "depart": "source", "take": "target"}
    for step in STEPS:
        for victim in VICTIMS:
            if THOROUGH or victim in ("balancer", others.get(step)):
                yield step, victim


@pytest.mark.thorough
@pytest.mark.turns(3)
@pytest.mark.parametrize(("step", "victim"), list(kills()))
async def test_a_kill_at_any_step_loses_nothing_and_doubles_nothing(
    cluster: Cluster, tmp_path: Path, step: str, victim: str
) -> None:
    # The shards whose orgs may notice the kill.
    struck: set[str] = set(SHARDS if victim == "routers" else ())
    async with cluster.working(VICTIMS[victim][0], tmp_path) as work:
        for (source, target), is_committed in zip(itertools.pairwise(VICTIMS[victim]), (False, True), strict=True):
            journey = Journey(cluster=cluster, work=work, source=source, target=target)
            await journey.take(step, victim, is_committed=is_committed)
            struck.update([journey.places[victim]] if victim in journey.places else [])
        await work.drain(cluster.shards.values())
    assert_all_is_well(cluster, work)
    harmed = {work.bystanders[shard] for shard in struck}
    refused = work.failed(work.bystanders.values())
    assert [call for call in refused if call.org not in harmed or call.code != "UNAVAILABLE"] == []
    if victim in ("balancer", "routers"):
        assert work.lookups_failed == []


async def test_who_works_through_a_router_that_sleeps_during_a_move_notices_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    asleep = cluster.routers[0].pids
    async with cluster.working(S2, tmp_path) as work:
        await work.hold_leases()
        for pid in asleep:
            os.kill(pid, signal.SIGSTOP)
        try:
            await cluster.wish(work.org, S3)
            cluster.have_it_looked()
            await work.ack_held()
            await cluster.at_rest(work.org, S3)
        finally:
            for pid in asleep:
                os.kill(pid, signal.SIGCONT)
        await work.drain(cluster.shards.values())
    assert_all_is_well(cluster, work)
    assert work.failed(work.orgs) == []
    assert work.lookups_failed == []
    # No stream ends either.
    assert [call for call in work.seen().calls if call.verb is Verb.CONSUME and call.code] == []
