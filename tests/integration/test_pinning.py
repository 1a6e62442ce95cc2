"""Orgs get their own slots: while operators and balancers die, while work continues, and while the orgs' hash slots
move (I1, I3, I5, I6)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping

import pytest

from balancer.pins import plan
from shard.errors import NotOwned, NotPinned, ShardUnavailable, SlotMoves, TooManyPins
from shard.placement import catalog, move_steps, pins, statements
from shard.placement.catalog import Catalog
from shard.placement.cluster_file import ShardEntry, ShardState
from shard.placement.pins import OnShard, PinTarget, WithLabel
from shard.placement.slots import SLOTS, slot_of
from shard.postgres import arrays
from shard.queue.settle import Settlement
from shard.queue_settings import QueueSettings
from shard.vocabulary import JobId, NewJobs, OrgId, QueueName, ShardName, Slot
from tests.jobs import QUEUE, ids_of, lease_jobs, some_jobs
from tests.pair import A, B, Died, Fate, Mortal, Pair, deaths, mortal_mover
from tests.timemachine import NO_HURRY, until_blocked

EU = WithLabel("region", "eu")
PAUSED, RESUMED = QueueSettings(paused=True), QueueSettings(paused=False)


def neighbour_of(org: OrgId) -> OrgId:
    """Returns another org that has the same hash slot."""
    names = (OrgId(f"{org}-neighbour-{n}") for n in itertools.count())
    return next(name for name in names if slot_of(name) == slot_of(org))


async def slots_there(pair: Pair, shard: ShardName, org: OrgId) -> tuple[int | None, set[int]]:
    """Returns the slot in which a shard has the org, and the slots in which the shard has the org's queues."""
    parameters = {"org": org}
    orgs = await pair.databases[shard].run(b"SELECT slot FROM windrow.org WHERE org = %(org)s", parameters)
    queues = await pair.databases[shard].run(b"SELECT slot FROM windrow.queue WHERE org = %(org)s", parameters)
    return (orgs[0][0] if orgs else None), {slot for (slot,) in queues}


async def catalog_rows(pair: Pair) -> object:
    """Returns every row of the catalog that a pin may change."""
    tables = (
        b"SELECT * FROM windrow.placement ORDER BY slot",
        b"SELECT slot, shard, left_at FROM windrow.former_owner ORDER BY slot, shard",
        b"SELECT * FROM windrow.pin ORDER BY slot",
        b"SELECT epoch FROM windrow.catalog",
    )
    return [await pair.catalog.run(table, {}) for table in tables]


async def send(pair: Pair, known: Catalog, jobs: NewJobs) -> dict[int, JobId]:
    """Enqueues as a router does that has this copy of the catalog. Raises NotOwned."""
    placement = known.placement(jobs.org)
    (writer,) = placement.writes
    found: dict[int, JobId] = {}
    for former in placement.former:
        if former.shard != writer:
            found.update(await pair.store(former.shard).known(jobs))
    rest = [at for at in range(len(jobs)) if at not in found]
    late = await pair.store(writer).enqueue(jobs.only(rest), epoch=placement.epoch) if rest else {}
    return found | {rest[at]: name for at, name in late.items()}


async def move_hash_slot(pair: Pair, org: OrgId, *, target: ShardName) -> None:
    move = await catalog.begin_move(pair.catalog, await pair.known(), [slot_of(org)], target=target)
    assert move is not None
    await pair.mover(move).finish()


# In the catalog


async def test_a_pinned_org_has_a_slot_of_its_own_at_rest_where_it_lives(pair: Pair, org: OrgId) -> None:
    await pair.move([org], target=B)
    before = await pair.known()
    pin = await pins.pin(pair.catalog, org, EU)
    known = await pair.known()
    assert (pin.org, pin.slot, pin.epoch, pin.target) == (org, SLOTS, before.epoch + 1, EU)
    assert (known.epoch, known.slot(org)) == (pin.epoch, pin.slot)
    hashed, own = known.slots[slot_of(org)], known.slots[pin.slot]
    assert hashed == before.slots[slot_of(org)]
    assert (own.writes, own.reads, own.epoch) == ((B,), (B,), pin.epoch)
    assert own.former == hashed.former
    assert [former.shard for former in own.former] == [A]
    assert await pins.read(pair.catalog) == await pins.read_on(pair.catalog, B) == [pin]
    assert await pins.read_on(pair.catalog, A) == []


async def test_an_org_that_is_pinned_again_keeps_its_slot_and_is_wished_elsewhere(pair: Pair, org: OrgId) -> None:
    first = await pins.pin(pair.catalog, org, EU)
    before = await catalog_rows(pair)
    assert await pins.pin(pair.catalog, org, EU) == first
    assert await catalog_rows(pair) == before
    second = await pins.pin(pair.catalog, org, OnShard(B))
    assert (second.slot, second.epoch, second.target) == (first.slot, first.epoch, OnShard(B))
    assert await pins.read(pair.catalog) == [second]


async def test_an_org_that_is_unpinned_keeps_its_slot_and_follows_its_hash(pair: Pair, org: OrgId) -> None:
    with pytest.raises(NotPinned, match=f"org '{org}' is not pinned"):
        await pins.unpin(pair.catalog, org)
    pin = await pins.pin(pair.catalog, org, OnShard(B))
    assert (await pins.unpin(pair.catalog, org)).target is None
    (after,) = await pins.read(pair.catalog)
    assert (after.slot, after.epoch, after.target) == (pin.slot, pin.epoch, None)
    with pytest.raises(NotPinned):
        await pins.unpin(pair.catalog, org)
    assert (await pair.known()).slot(org) == pin.slot
    assert (await pins.pin(pair.catalog, org, EU)).slot == pin.slot


async def test_an_org_cannot_be_pinned_while_its_hash_slot_moves(pair: Pair, org: OrgId) -> None:
    await pair.store(A).enqueue(some_jobs(org, 1))
    await lease_jobs(pair.store(A), org)
    move = await pair.begin([org], target=B)
    before = await catalog_rows(pair)
    why = rf"org '{org}' is in slot {slot_of(org)}, which is moving from shard 's1' to 's2'.*try again"
    for _ in range(4):
        with pytest.raises(SlotMoves, match=why):
            await pins.pin(pair.catalog, org, EU)
        assert await catalog_rows(pair) == before
        # Take the next step: close, open, switch, or the first chunk of jobs.
        assert await pair.mover(move).step()
        before = await catalog_rows(pair)
    # An org that has its own slot can be pinned elsewhere at any time.
    await pair.databases[A].run(b"UPDATE windrow.job SET visible_at = now()", {})
    await pair.mover(move).finish()
    assert (await pins.pin(pair.catalog, org, EU)).target == EU
    back = await pair.begin([org], target=A)
    assert (await pins.pin(pair.catalog, org, OnShard(A))).target == OnShard(A)
    assert (await pins.unpin(pair.catalog, org)).target is None
    await pair.mover(back).finish()


async def test_operators_at_the_same_time_make_one_slot_for_each_org(pair: Pair, org: OrgId) -> None:
    orgs = [OrgId(f"{org}-{n}") for n in range(8)]
    wishes: list[PinTarget] = [EU, OnShard(A), OnShard(B)]
    org_pins = await asyncio.gather(*(pins.pin(pair.catalog, one, wish) for one in orgs for wish in wishes))
    slots = {pin.org: pin.slot for pin in org_pins}
    assert {(pin.org, pin.slot) for pin in org_pins} == set(slots.items())
    assert sorted(slots.values()) == list(range(SLOTS, SLOTS + len(orgs)))
    known = await pair.known()
    assert dict(known.pins) == slots
    for pin in await pins.read(pair.catalog):
        assert pin.target in wishes


async def test_a_pin_and_a_move_of_the_hash_slot_at_the_same_time_exclude_each_other(pair: Pair, org: OrgId) -> None:
    """The transaction that locks the slot's row first succeeds."""
    known = await pair.known()
    async with pair.catalog.transaction() as operator:
        await operator.run(statements.LOCK_PLACEMENT, {"slot": slot_of(org)})
        beginning = asyncio.create_task(catalog.begin_move(pair.catalog, known, [slot_of(org)], target=B))
        await until_blocked(pair.databases[A])
        wished = {"org": org, "shard": None, "label": None, "value": None}
        assert await operator.run(statements.INSERT_PIN, {"hash_slot": slot_of(org), **wished})
    move = await beginning
    assert move is not None
    await pair.mover(move).finish()
    assert await pair.placement(org) == ((A,), (A,))
    assert (await pair.known()).slots[slot_of(org)].reads == (B,)


async def test_there_are_no_more_slots_than_their_numbers_allow(pair: Pair, org: OrgId) -> None:
    await pair.catalog.run(
        b"INSERT INTO windrow.placement (slot, writes, reads, epoch) VALUES (32766, '{s1}', '{s1}', 1)", {}
    )
    assert (await pins.pin(pair.catalog, org, EU)).slot == 32_767
    before = await catalog_rows(pair)
    with pytest.raises(TooManyPins, match="16,384 orgs have a slot of their own"):
        await pins.pin(pair.catalog, OrgId(f"{org}-more"), EU)
    assert await catalog_rows(pair) == before


@pytest.mark.parametrize("how", ["before", "rolled back", "unheard", "cancelled", "cut"])
async def test_a_pin_is_made_once_wherever_its_operator_died(pair: Pair, org: OrgId, how: str) -> None:
    for at in itertools.count(1):
        one = OrgId(f"{org}-{at}")
        fate = Fate(at=at, how=how)
        database = Mortal(A, pair.dsns[A], fate)
        await database.open()
        for verb in (
            pins.pin(database, one, EU),
            pins.pin(database, one, OnShard(B)),
            pins.unpin(database, one),
        ):
            with contextlib.suppress(Died, ShardUnavailable, asyncio.CancelledError, NotPinned):
                await asyncio.create_task(verb)
        await database.close()
        # The next operator may be interrupted in the same way.
        pin = None
        while pin is None:
            with contextlib.suppress(ShardUnavailable):
                pin = await pins.pin(pair.catalog, one, EU)
        assert await pins.pin(pair.catalog, one, EU) == pin
        assert [found.org for found in await pins.read(pair.catalog)].count(one) == 1
        if fate.acts < at:
            break
    known = await pair.known()
    assert len(known.slots) == SLOTS + len(known.pins)


# On shards


async def test_pinning_alone_changes_nothing_for_routers_old_and_new(pair: Pair, org: OrgId) -> None:
    old = await pair.known()
    jobs = some_jobs(org, 1, dedup_keys=["k"])
    assert await send(pair, old, jobs) == {}
    await pins.pin(pair.catalog, org, OnShard(B))
    new = await pair.known()
    for known in (old, new):
        assert await send(pair, known, jobs) == {0: ids_of(jobs)[0]}
        assert await send(pair, known, some_jobs(org, 1, dedup_keys=["k"])) == {0: ids_of(jobs)[0]}
        assert await send(pair, known, some_jobs(org, 1, queue=f"new-{known.epoch}")) == {}
    # A router that starts now tells the shard about the org's own slot. This changes nothing either.
    await catalog.grant_slots(pair.databases[A], new)
    for known in (old, new):
        assert await send(pair, known, jobs) == {0: ids_of(jobs)[0]}


@pytest.mark.parametrize("granted", [False, True])
async def test_an_old_router_is_refused_and_learns_once_the_shard_knows_the_orgs_slot(
    pair: Pair, org: OrgId, granted: bool
) -> None:
    old = await pair.known()
    jobs = some_jobs(org, 1)
    neighbour = neighbour_of(org)
    for one in (jobs, some_jobs(neighbour, 1)):
        assert await send(pair, old, one) == {}
    pin = await pins.pin(pair.catalog, org, OnShard(B))
    new = await pair.known()
    if granted:
        await catalog.grant_slots(pair.databases[A], new)
    assert await pins.adopt(pair.databases[A], [pin])
    assert await slots_there(pair, A, org) == (pin.slot, {pin.slot})
    assert await slots_there(pair, A, neighbour) == (slot_of(org), {slot_of(org)})
    for again in (jobs, some_jobs(org, 1, queue="new")):
        with pytest.raises(NotOwned) as caught:
            await send(pair, old, again)
        assert (caught.value.slot, caught.value.epoch) == (pin.slot, pin.epoch)
    # The refused call has created a queue. The queue is in the org's own slot too.
    assert await slots_there(pair, A, org) == (pin.slot, {pin.slot})
    assert await send(pair, new, jobs) == {0: ids_of(jobs)[0]}
    assert await send(pair, new, some_jobs(org, 1, queue="newer")) == {}
    for known in (old, new):
        assert await send(pair, known, some_jobs(neighbour, 1)) == {}
    with pytest.raises(NotOwned):
        await pair.books[A].alter_queue(org, QUEUE, PAUSED, epoch=old.placement(org).epoch)
    assert (await pair.books[A].alter_queue(org, QUEUE, PAUSED, epoch=pin.epoch)).settings.paused
    await pair.balance()


async def test_an_org_that_nobody_has_heard_of_is_pinned_and_never_taken_for_its_hash(pair: Pair, org: OrgId) -> None:
    old = await pair.known()
    pin = await pins.pin(pair.catalog, org, OnShard(B))
    move = await pair.begin([org], target=B)
    await pair.mover(move).finish()
    assert await pair.placement(org) == ((B,), (B,))
    new = await pair.known()
    with pytest.raises(NotOwned):
        await send(pair, old, some_jobs(org, 1))
    jobs = some_jobs(org, 2)
    assert await send(pair, new, jobs) == {}
    for shard in (A, B):
        assert await slots_there(pair, shard, org) == (pin.slot, {pin.slot})
    assert {shard for shard, _ in await pair.jobs(org, ids_of(jobs))} == {B}


async def test_a_pinned_org_moves_and_leaves_its_neighbours(pair: Pair, org: OrgId) -> None:
    old = await pair.known()
    neighbour = neighbour_of(org)
    jobs, others = some_jobs(org, 3, dedup_keys=["k"]), some_jobs(neighbour, 3)
    for one in (jobs, others):
        assert await send(pair, old, one) == {}
    await lease_jobs(pair.store(A), neighbour)
    await pins.pin(pair.catalog, org, OnShard(B))
    between = await pair.known()
    move = await pair.move([org], target=B)
    new = await pair.known()
    assert {shard for shard, _ in await pair.jobs(org, ids_of(jobs))} == {B}
    assert {shard for shard, _ in await pair.jobs(neighbour, ids_of(others))} == {A}
    again = some_jobs(org, 1, dedup_keys=["k"])
    for known in (old, between):
        with pytest.raises(NotOwned) as caught:
            await send(pair, known, again)
        assert (caught.value.slot, caught.value.epoch) == (new.slot(org), move.epoch)
    assert await send(pair, new, again) == {0: ids_of(jobs)[0]}
    for known in (old, between, new):
        assert await send(pair, known, some_jobs(neighbour, 1)) == {}
    await pair.balance()


@pytest.mark.parametrize("heard_of", [False, True])
async def test_a_pinned_org_stays_when_the_slot_of_its_hash_goes(pair: Pair, org: OrgId, heard_of: bool) -> None:
    """The org is pinned to the shard where it lives. The shard learns about the org's own slot only when the hash slot
    moves."""
    old = await pair.known()
    neighbour = neighbour_of(org)
    jobs, others = some_jobs(org, 3, dedup_keys=["k"]), some_jobs(neighbour, 2)
    assert await send(pair, old, others) == {}
    if heard_of:
        assert await send(pair, old, jobs) == {}
    pin = await pins.pin(pair.catalog, org, OnShard(A))
    await move_hash_slot(pair, org, target=B)
    new = await pair.known()
    assert (new.placement(org).reads, new.placement(neighbour).reads) == ((A,), (B,))
    assert await slots_there(pair, A, org) == (pin.slot, {pin.slot} if heard_of else set())
    assert {shard for shard, _ in await pair.jobs(neighbour, ids_of(others))} == {B}
    for one in (jobs, some_jobs(neighbour, 1)):
        with pytest.raises(NotOwned):
            await send(pair, old, one)
    assert await send(pair, new, jobs) == (dict(enumerate(ids_of(jobs))) if heard_of else {})
    assert {shard for shard, _ in await pair.jobs(org, ids_of(jobs))} == {A}
    assert await send(pair, new, some_jobs(neighbour, 1)) == {}
    await pair.balance()


async def test_what_a_shard_remembers_of_an_org_by_its_hash_never_comes_over_what_it_has(
    pair: Pair, org: OrgId
) -> None:
    """The org has lived on B and is pinned to A. Its hash slot moves to B and back, together with what B remembers of
    the org."""
    neighbour = neighbour_of(org)
    await pair.store(A).enqueue(some_jobs(neighbour, 1))
    await move_hash_slot(pair, org, target=B)
    done = some_jobs(org, 1)
    assert await send(pair, await pair.known(), done) == {}
    await pair.books[B].alter_queue(org, QUEUE, RESUMED, epoch=(await pair.known()).placement(org).epoch)
    ((_, lease),) = await lease_jobs(pair.store(B), org)
    await pair.store(B).settle(Settlement.ack(org, [lease]))
    await move_hash_slot(pair, org, target=A)
    pin = await pins.pin(pair.catalog, org, OnShard(A))
    await pair.books[A].alter_queue(org, QUEUE, PAUSED, epoch=pin.epoch)
    await move_hash_slot(pair, org, target=B)
    assert await slots_there(pair, B, org) == (slot_of(org), {slot_of(org)})
    with pytest.raises(NotOwned):
        await pair.store(B).enqueue(some_jobs(org, 1), epoch=pin.epoch)
    await move_hash_slot(pair, org, target=A)
    assert await slots_there(pair, A, org) == (pin.slot, {pin.slot})
    known = await pair.known()
    assert (await pair.books[A].get_queue(org, QUEUE)).settings.paused
    # An enqueue of the job that was stored on B is recognised as a repeat.
    assert await send(pair, known, done) == {0: ids_of(done)[0]}
    assert await send(pair, known, some_jobs(org, 1)) == {}
    await pair.move([org], target=B)
    assert await slots_there(pair, B, org) == (pin.slot, {pin.slot})
    assert (await pair.books[B].get_queue(org, QUEUE)).settings.paused
    await pair.balance()


async def test_a_queue_that_is_being_made_meanwhile_is_waited_for(pair: Pair, org: OrgId) -> None:
    await pair.store(A).enqueue(some_jobs(org, 1))
    pin = await pins.pin(pair.catalog, org, OnShard(B))
    names = {"orgs": arrays.texts([org]), "queues": arrays.names(["new"])}
    await pair.databases[A].run(statements.INSERT_NAMES, {**names, "slots": arrays.numbers([slot_of(org)])})
    async with pair.databases[A].transaction() as router:
        await router.run(statements.INSERT_QUEUES, {**names, "relisted": True})
        assert not await pins.adopt(pair.databases[A], [pin])
        assert await slots_there(pair, A, org) == (slot_of(org), {slot_of(org)})
        assert await pair.slots([pin.slot]) == {A: [], B: []}
    assert await pins.adopt(pair.databases[A], [pin])
    assert await slots_there(pair, A, org) == (pin.slot, {pin.slot})


async def test_an_org_that_gets_its_own_slot_while_another_is_erased_holds_up_no_erasure(
    pair: Pair, org: OrgId
) -> None:
    await pair.store(A).enqueue(some_jobs(org, 1))
    pin = await pins.pin(pair.catalog, org, OnShard(B))
    async with pair.databases[A].transaction() as erasing:
        await erasing.execute(statements.LOCK_SLOTS, prepare=False)
        await erasing.execute(NO_HURRY)
        adopting = asyncio.create_task(pins.adopt(pair.databases[A], [pin]))
        await until_blocked(pair.databases[A])
        # The adoption waits for the lock of the slots, and has not locked the queues yet.
        await erasing.execute(statements.LOCK_QUEUES, prepare=False)
    assert await adopting
    assert await slots_there(pair, A, org) == (pin.slot, {pin.slot})


async def test_enqueues_go_on_meanwhile_and_what_would_make_or_change_a_queue_waits(pair: Pair, org: OrgId) -> None:
    old = await pair.known()
    assert await send(pair, old, some_jobs(org, 1)) == {}
    pin = await pins.pin(pair.catalog, org, OnShard(B))
    named = {"orgs": arrays.texts([org]), "slots": arrays.numbers([pin.slot])}
    database = pair.databases[A]
    async with database.transaction() as balancer:
        await balancer.execute(statements.LOCK_QUEUES, prepare=False)
        await balancer.execute(NO_HURRY)
        await balancer.run(
            statements.GRANT_SLOTS, {"slots": arrays.numbers([pin.slot]), "epochs": arrays.numbers([pin.epoch])}
        )
        await balancer.run(statements.ADOPT_ORGS, named)
        await balancer.run(statements.ADOPT_QUEUES, named)
        assert await send(pair, old, some_jobs(org, 1)) == {}
        altering = asyncio.create_task(pair.books[A].alter_queue(org, QUEUE, PAUSED, epoch=pin.epoch))
        making = asyncio.create_task(pair.store(A).enqueue(some_jobs(org, 1, queue="new"), epoch=pin.epoch))
        await until_blocked(database, sessions=2)
    assert (await altering).settings.paused
    assert await making == {}
    assert await slots_there(pair, A, org) == (pin.slot, {pin.slot})


async def test_what_is_told_a_shard_late_changes_nothing(pair: Pair, org: OrgId) -> None:
    """The test repeats the adoption, as a process does that was frozen for a while."""
    await pair.store(A).enqueue(some_jobs(org, 2))
    pin = await pins.pin(pair.catalog, org, OnShard(B))

    async def look() -> object:
        return [await pair.slots([pin.slot]), *[await slots_there(pair, shard, org) for shard in (A, B)]]

    for target in (B, A, B):
        await pair.move([org], target=target)
        before = await look()
        # `adopt` checks first, and finds nothing to do. So the test also runs the statements of `adopt` without the
        # check.
        assert await pins.adopt(pair.databases[A], [pin])
        named = {"orgs": arrays.texts([org]), "slots": arrays.numbers([pin.slot])}
        async with pair.databases[A].transaction() as connection:
            await connection.run(
                statements.GRANT_SLOTS, {"slots": arrays.numbers([pin.slot]), "epochs": arrays.numbers([pin.epoch])}
            )
            await connection.run(statements.INSERT_NAMES, {**named, "queues": "{}"})
            await connection.run(statements.ADOPT_ORGS, named)
            await connection.run(statements.ADOPT_QUEUES, named)
        assert await look() == before


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["before", "rolled back", "unheard", "cancelled", "cut"])
@pytest.mark.timeout(300)
async def test_an_org_is_settled_by_another_balancer_wherever_the_first_one_died(
    pair: Pair, org: OrgId, how: str
) -> None:
    """The first balancer stops before the close, each time at a later act. After the close, the move is like any other
    move. One pinned org moves. Another pinned org stays while its hash slot moves."""
    # The hash slots that earlier rounds have moved to the second shard.
    moved: set[Slot] = set()
    for at in deaths(how):
        goes, stays = (
            next(one for n in itertools.count() if slot_of(one := OrgId(f"{org}-{at}-{n}-{role}")) not in moved)
            for role in ("goes", "stays")
        )
        moved.add(slot_of(stays))
        old = await pair.known()
        jobs = {one: some_jobs(one, 3, dedup_keys=["k"]) for one in (goes, stays)}
        org_pins = {}
        for one in (goes, stays):
            assert await send(pair, old, jobs[one]) == {}
            org_pins[one] = await pins.pin(pair.catalog, one, OnShard(B))
        new = await pair.known()
        move = await catalog.begin_move(pair.catalog, new, [org_pins[goes].slot, slot_of(stays)], target=B)
        assert move is not None
        fate = Fate(at=at, how=how)
        async with mortal_mover(pair, move, fate) as mover:
            with contextlib.suppress(Died, ShardUnavailable, asyncio.CancelledError):
                await asyncio.create_task(mover.step())
        # Wherever the balancer died, a repeated enqueue is answered with the first id.
        for one in (goes, stays):
            for known in (old, new):
                with contextlib.suppress(NotOwned):
                    assert await send(pair, known, some_jobs(one, 1, dedup_keys=["k"])) == {0: ids_of(jobs[one])[0]}
        await pair.mover(move).finish()
        new = await pair.known()
        for one, home in ((goes, B), (stays, A)):
            assert (new.placement(one).writes, new.placement(one).reads) == ((home,), (home,))
            assert {shard for shard, _ in await pair.jobs(one, ids_of(jobs[one]))} == {home}
            assert await slots_there(pair, home, one) == (org_pins[one].slot, {org_pins[one].slot})
            assert await send(pair, new, jobs[one]) == dict(enumerate(ids_of(jobs[one])))
            with pytest.raises(NotOwned):
                await send(pair, old, some_jobs(one, 1))
        await pair.balance()
        if fate.acts < at:
            # There are two transactions. The first one adopts the org, before the balancer tells the target anything.
            # The second one closes the slot.
            assert fate.names.count("transaction") == 2
            assert (
                fate.names.index("find_unadopted") < fate.names.index("transaction") < fate.names.index("read_queues")
            )
            break


async def test_ids_and_keys_from_before_the_pin_are_known_after(pair: Pair, org: OrgId) -> None:
    """Every shard where the org has ever lived knows the ids and keys, no matter whether the org was pinned there."""
    sent: dict[str, NewJobs] = {}

    async def live_on(name: str) -> None:
        known = await pair.known()
        done, left = some_jobs(org, 1, queue=f"{name}-done", dedup_keys=[name]), some_jobs(org, 1, queue=name)
        for jobs in (done, left):
            assert await send(pair, known, jobs) == {}
        ((_, lease),) = await lease_jobs(pair.store(known.placement(org).writes[0]), org, queue=f"{name}-done")
        await pair.store(known.placement(org).writes[0]).settle(Settlement.ack(org, [lease]))
        sent[f"{name}-done"], sent[name] = done, left
        for jobs in sent.values():
            assert await send(pair, known, jobs) == {0: ids_of(jobs)[0]}
            twin = some_jobs(org, 1, queue=jobs.queues[0], dedup_keys=list(jobs.dedup_keys.values()))
            if jobs.dedup_keys:
                assert await send(pair, known, twin) == {0: ids_of(jobs)[0]}

    await live_on("first")
    await pair.move([org], target=B)
    await live_on("second")
    await pins.pin(pair.catalog, org, OnShard(A))
    await live_on("pinned")
    await pair.move([org], target=A)
    await live_on("moved")
    await move_hash_slot(pair, org, target=A)
    await pins.unpin(pair.catalog, org)
    await pair.move([org], target=B)
    await live_on("unpinned")
    assert len(sent) == 10
    await pair.balance()


# Moving pinned orgs as a balancer does


async def follow(pair: Pair, entries: list[ShardEntry], begun: list[tuple[OrgId, ShardName]]) -> Mapping[OrgId, str]:
    """Moves pinned orgs until each org is where its pin wants it. Returns the orgs that cannot be moved, with the
    reasons."""
    while True:
        org_pins = await pins.read(pair.catalog)
        known = await pair.known()
        planned = plan(known, org_pins, entries)
        away = [pin for pin in org_pins if known.slots[pin.slot].reads != (planned.owners[pin.slot],)]
        if not away:
            return planned.complaints
        for pin in away:
            target = planned.owners[pin.slot]
            begun.append((pin.org, target))
            move = await catalog.begin_move(pair.catalog, known, [pin.slot], target=target)
            assert move is not None
            await pair.mover(move).finish()


async def test_an_org_that_is_pinned_by_a_label_is_never_sent_to_a_shard_without(pair: Pair, org: OrgId) -> None:
    def file(a: str, b: str, *, draining: ShardName | None = None) -> list[ShardEntry]:
        """Returns a cluster file in which shard A has the region `a`, and shard B has the region `b`."""
        return [
            ShardEntry(
                name=name,
                dsn="",
                state=ShardState.DRAINING if name == draining else ShardState.ACTIVE,
                labels={"region": region},
            )
            for name, region in ((A, a), (B, b))
        ]

    begun: list[tuple[OrgId, ShardName]] = []
    jobs = some_jobs(org, 3)
    await pair.store(A).enqueue(jobs)
    await pins.pin(pair.catalog, org, EU)
    assert await follow(pair, file("us", "eu"), begun) == {}
    assert begun == [(org, B)]
    for entries in (
        file("us", "eu", draining=B),
        file("us", "asia"),
        file("us", "us"),
        file("eu", "us", draining=A),
    ):
        assert f"org '{org}' stays on shard 's2'" in (await follow(pair, entries, begun))[org]
    assert begun == [(org, B)]
    # The org stays where it is, in whichever direction its hash slot moves.
    for target in (B, A):
        await move_hash_slot(pair, org, target=target)
    assert await follow(pair, file("eu", "eu"), begun) == {}
    assert begun == [(org, B)]
    await pins.unpin(pair.catalog, org)
    assert await follow(pair, file("us", "eu"), begun) == {}
    assert begun == [(org, B), (org, A)]
    assert {shard for shard, _ in await pair.jobs(org, ids_of(jobs))} == {A}
    await pair.balance()


async def test_an_org_that_is_unpinned_while_it_moves_comes_back(pair: Pair, org: OrgId) -> None:
    entries = [ShardEntry(name=name, dsn="") for name in (A, B)]
    jobs = some_jobs(org, 3)
    await pair.store(A).enqueue(jobs)
    await pins.pin(pair.catalog, org, OnShard(B))
    move = await pair.begin([org], target=B)
    # Take the steps close and open.
    for _ in range(2):
        assert await pair.mover(move).step()
    await pins.unpin(pair.catalog, org)
    known = await pair.known()
    assert plan(known, await pins.read(pair.catalog), entries).owners == {known.slot(org): A}
    await pair.mover(move).finish()
    begun: list[tuple[OrgId, ShardName]] = []
    await follow(pair, entries, begun)
    assert begun == [(org, A)]
    assert {shard for shard, _ in await pair.jobs(org, ids_of(jobs))} == {A}


async def test_a_move_waits_for_queues_that_take_their_time(pair: Pair, org: OrgId) -> None:
    await pair.store(A).enqueue(some_jobs(org, 1))
    await pins.pin(pair.catalog, org, OnShard(B))
    move = await pair.begin([org], target=B)
    async with pair.databases[A].transaction() as somebody:
        await somebody.execute("LOCK TABLE windrow.queue IN ROW EXCLUSIVE MODE")
        moving_on = asyncio.create_task(pair.mover(move).finish())
        await until_blocked(pair.databases[A])
        assert (await move_steps.read_slots(pair.databases[A], move.slots)) == {}
        assert await pair.store(A).enqueue(some_jobs(org, 1, queue=QueueName(QUEUE))) == {}
    await moving_on
    assert await pair.placement(org) == ((B,), (B,))
