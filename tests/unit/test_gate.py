"""How a router admits calls: no org takes all places, calls that have ended are not counted, and memory is reserved
before work is done."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

import pytest

from router import buffer
from router.buffer import Account, Buffer
from router.codec.status import RequestLate, RouterFull, ShuttingDown
from router.gate import admission as gates
from router.gate.admission import CALLS_MAX, STREAMS_MAX, Context, Gate
from router.gate.auth.principal import Principal
from router.gate.call import Call
from router.gate.calls import DEADLINE_S_MAX
from router.gate.tracing import Tracing
from shard.vocabulary import OrgId
from tests.routers import PATIENCE_S

KIB = 1024


@pytest.fixture
def gate() -> Gate:
    return Gate(Tracing(), Buffer(64 * KIB))


class Peer:
    """The context of a call from a connection with this name, whose request never arrives."""

    def __init__(self, name: str) -> None:
        self._name = name

    def peer(self) -> str:
        return self._name

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""


async def begun(
    gate: Gate, peer: str = "ipv4:127.0.0.1:1", *, caller: Principal | None = None
) -> tuple[Call, asyncio.Event]:
    """Begins a call, which lasts until its event is set. `caller`: the principal that the call has proved."""
    inside: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
    end = asyncio.Event()

    async def serve() -> None:
        try:
            call = gate.begin(cast("Context", Peer(peer)))
            if caller is not None:
                call.principal = caller
                gate.identified(call)
            inside.set_result(call)
        except (RouterFull, ShuttingDown) as error:
            inside.set_exception(error)
            return
        await end.wait()

    task = asyncio.create_task(serve())
    TASKS.add(task)
    task.add_done_callback(TASKS.discard)
    return await inside, end


TASKS: set[asyncio.Task[None]] = set()


def entered(gate: Gate, org: str, *, at_most: int = CALLS_MAX) -> list[Call]:
    """Begins calls until the gate admits no more. Returns the admitted calls."""
    calls: list[Call] = []
    for _ in range(at_most):
        call = Call(gate.buffer, peer="ipv4:127.0.0.1:1")
        try:
            gate.admit(call, org)
        except RouterFull:
            break
        calls.append(call)
    return calls


async def test_one_org_has_half_of_the_calls_and_others_get_in(gate: Gate) -> None:
    assert len(entered(gate, "busy")) == CALLS_MAX // 2
    with pytest.raises(RouterFull, match="takes 4,000 calls at a time, and from one org never more than"):
        gate.admit(Call(gate.buffer, peer="p"), "busy")
    assert len(entered(gate, "other")) == CALLS_MAX // 4


async def test_a_call_keeps_its_place_until_its_task_has_ended(gate: Gate) -> None:
    call, end = await begun(gate)
    gate.admit(call, "busy")
    await call.reserve(10, received=10)
    gate.answered(call, 20)
    assert len(entered(gate, "busy")) == CALLS_MAX // 2 - 1
    assert gate.buffer.held == 20
    assert gate.arrivals.inside == {"ipv4:127.0.0.1:1": 1}
    end.set()
    await asyncio.gather(*TASKS)
    await asyncio.sleep(0)
    assert len(entered(gate, "busy")) == 1
    assert (gate.buffer.held, gate.arrivals.inside) == (0, {})


async def test_calls_that_wait_for_jobs_leave_their_places_to_others(gate: Gate) -> None:
    calls = entered(gate, "busy")
    with gate.waiting(calls[0]):
        assert len(entered(gate, "busy")) == 1
    # The earlier call counts again, although there is no room for it.
    assert entered(gate, "busy") == []


def test_one_org_has_half_of_the_streams(gate: Gate) -> None:
    streams = [gate.stream("busy") for _ in range(STREAMS_MAX // 2)]
    for stream in streams:
        stream.__enter__()
    with pytest.raises(RouterFull, match="takes 10,000 streams"), gate.stream("busy"):
        pass
    with gate.stream("other"):
        pass
    streams[0].__exit__(None, None, None)
    with gate.stream("busy"):
        pass


async def test_calls_of_one_org_whose_requests_never_come_leave_places_to_others_over_however_many_connections(
    gate: Gate,
) -> None:
    busy, other, operator = (
        Principal(name="key", org=org, scopes=frozenset()) for org in (OrgId("busy"), OrgId("other"), None)
    )
    ends: list[asyncio.Event] = []
    for number in range(40):
        with contextlib.suppress(RouterFull):
            for _ in range(1000):
                _, end = await begun(gate, f"ipv4:127.0.0.1:{number}", caller=busy)
                ends.append(end)
    assert len(ends) == (CALLS_MAX + STREAMS_MAX) // 2
    for caller in (other, operator):
        for _ in range(100):
            await begun(gate, "ipv4:127.0.0.2:1", caller=caller)
    with pytest.raises(RouterFull):
        await begun(gate, "ipv4:127.0.0.3:1", caller=busy)
    tasks = list(TASKS)
    for end in ends:
        end.set()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    # Calls that have ended do not count.
    await begun(gate, "ipv4:127.0.0.3:1", caller=busy)
    tasks = list(TASKS)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_memory_of_a_caller_of_one_org_counts_for_that_org_before_its_request_names_it(gate: Gate) -> None:
    call, end = await begun(gate)
    call.principal = Principal(name="key", org=OrgId("busy"), scopes=frozenset())
    gate.identified(call)
    await call.reserve(10)
    assert gate.buffer.held_by("busy") == 10
    assert gate.buffer.held_by("") == 0
    end.set()


async def test_connections_that_have_all_the_calls_they_may_leave_some_to_another(gate: Gate) -> None:
    count = 0
    for number in range(15):
        with contextlib.suppress(RouterFull):
            for _ in range(1000):
                await begun(gate, f"ipv4:127.0.0.1:{number}")
                count += 1
    assert count > CALLS_MAX
    for _ in range(100):
        await begun(gate, "ipv4:127.0.0.2:1")
    tasks = list(TASKS)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_request_that_does_not_come_whole_in_time_is_refused(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate._receiving, "_limit_s", 0.05)
    context = cast("Context", Peer("p"))
    with pytest.raises(RequestLate, match="did not arrive completely within"):
        await asyncio.wait_for(gate.receive(context, Call(gate.buffer, peer="p")), PATIENCE_S)
    assert gates.RECEIVE_S_MAX < DEADLINE_S_MAX


async def test_a_caller_that_leaves_while_its_request_comes_is_cancelled_and_not_late(gate: Gate) -> None:
    receiving = asyncio.create_task(gate.receive(cast("Context", Peer("p")), Call(gate.buffer, peer="p")))
    await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving


async def test_the_connection_of_a_peer_that_leaves_an_answer_unread_is_hung_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.gate.admission.UNREAD_S_MAX", 0.05)
    hung_up: asyncio.Queue[str] = asyncio.Queue()
    gate = Gate(Tracing(), Buffer(KIB), hung_up.put_nowait)
    slow, read = Call(gate.buffer, peer="slow"), Call(gate.buffer, peer="reads")
    gate.writing(read)
    gate.written(read)
    gate.answered(slow, 1)
    assert await asyncio.wait_for(hung_up.get(), PATIENCE_S) == "slow"
    assert hung_up.empty()


async def test_a_gate_that_drains_refuses_new_calls_and_is_empty_when_the_last_one_has_ended() -> None:
    hung_up: list[str] = []
    gate = Gate(Tracing(), Buffer(KIB), hung_up.append)
    _, end = await begun(gate, "ipv6:%5B::1%5D:2")
    gate.drain()
    with pytest.raises(ShuttingDown):
        await begun(gate)
    assert hung_up == []
    end.set()
    await asyncio.wait_for(gate.empty(), PATIENCE_S)
    assert hung_up == ["ipv6:[::1]:2"]


@pytest.mark.parametrize(("left_s", "serves"), [(PATIENCE_S, True), (0.0, False)])
async def test_a_connection_whose_stream_winds_down_is_served_for_a_short_time(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, left_s: float, serves: bool
) -> None:
    monkeypatch.setattr(gates, "DRAIN_S", left_s)
    _, stream_ends = await begun(gate)
    gate.drain()
    if serves:
        _, end = await begun(gate)
        end.set()
    else:
        with pytest.raises(ShuttingDown):
            await begun(gate)
    with pytest.raises(ShuttingDown):
        await begun(gate, "ipv4:127.0.0.1:2")
    stream_ends.set()
    await asyncio.wait_for(gate.empty(), PATIENCE_S)


# ── Memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def account(buffer: Buffer, org: str, peer: str = "") -> Account:
    return Account(buffer, org=org, peer=peer or f"connection of {org}")


def test_an_org_or_a_connection_that_is_alone_has_half_of_the_memory() -> None:
    shared = Buffer(100)
    assert account(shared, "busy").take(1)
    assert account(shared, "busy", "another").take(49)
    assert not account(shared, "busy", "a third").take(1)
    assert not account(shared, "other", "another").take(2)
    assert account(shared, "other").take(25)


async def test_whoever_waits_for_memory_has_it_when_it_comes_free() -> None:
    shared = Buffer(100)
    first, second = account(shared, "busy"), account(shared, "busy", "second")
    assert first.take(50)
    waiting = asyncio.create_task(second.reserve(10))
    await asyncio.sleep(0)
    other = account(shared, "other")
    await asyncio.wait_for(other.reserve(10), PATIENCE_S)
    assert not waiting.done()
    first.give_back(20)
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert (first.held, second.held, shared.held) == (30, 10, 50)
    second.close()
    second.hold(5)
    second.give_back(7)
    assert shared.held == 40


async def test_memory_that_does_not_come_free_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "WAIT_S_MAX", 0.05)
    shared = Buffer(100)
    assert account(shared, "busy").take(50)
    late = account(shared, "busy", "late")
    with pytest.raises(RouterFull, match="takes 100 bytes in calls and answers"):
        await late.reserve(1)
    assert not shared.waits("busy")
    assert late.held == 0


@pytest.mark.parametrize("first", ["it leaves", "the memory comes free"])
async def test_whoever_stops_waiting_for_memory_leaves_its_place_to_the_next(first: str) -> None:
    shared = Buffer(100)
    holder = account(shared, "busy")
    assert holder.take(50)
    gone, stays = account(shared, "busy", "gone"), account(shared, "busy", "stays")
    leaving, waiting = asyncio.create_task(gone.reserve(40)), asyncio.create_task(stays.reserve(40, patiently=True))
    await asyncio.sleep(0)
    leaving.cancel()
    if first == "it leaves":
        await asyncio.wait({leaving})
    holder.close()
    await asyncio.wait({leaving})
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert (shared.held, gone.held, stays.held) == (40, 0, 40)


async def test_whoever_stops_waiting_for_memory_holds_up_nobody_behind_it_any_more() -> None:
    shared = Buffer(100)
    assert account(shared, "busy").take(40)
    large, small = account(shared, "busy", "large"), account(shared, "busy", "small")
    leaving, waiting = asyncio.create_task(large.reserve(30)), asyncio.create_task(small.reserve(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    leaving.cancel()
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert shared.held == 45


async def test_a_connection_that_is_full_holds_up_none_of_the_same_org_on_another_connection() -> None:
    shared = Buffer(100)
    # Other clients of the same proxy have filled the connection of the proxy.
    assert account(shared, "others", "proxy").take(45)
    stuck = asyncio.create_task(account(shared, "org", "proxy").reserve(20, patiently=True))
    behind = asyncio.create_task(account(shared, "org", "proxy").reserve(20))
    await asyncio.sleep(0)
    free = account(shared, "org", "its own")
    await asyncio.wait_for(free.reserve(10), PATIENCE_S)
    assert free.held == 10
    assert not behind.done()
    stuck.cancel()
    behind.cancel()
    await asyncio.wait({stuck, behind})
    assert not shared.waits("org")


async def test_requests_that_wait_for_memory_have_a_bound_of_their_own() -> None:
    shared = Buffer(800)
    assert account(shared, "busy", "holder").take(400)
    waiting = [
        asyncio.create_task(account(shared, "busy", f"connection {number}").reserve(30, received=30))
        for number in range(20)
    ]
    refused, stay = await asyncio.wait(waiting, timeout=1, return_when=asyncio.FIRST_EXCEPTION)
    assert len(stay) * 30 <= 100
    assert len(refused) == 20 - len(stay)
    assert all(isinstance(one.exception(), RouterFull) for one in refused)
    for one in stay:
        one.cancel()
    await asyncio.wait(stay)
    again = asyncio.create_task(account(shared, "busy", "later").reserve(30, received=30))
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()
    await asyncio.wait({again})


def test_an_org_that_held_nothing_is_not_remembered() -> None:
    shared = Buffer(100)
    gone = account(shared, "org", "gone")
    assert gone.take(0)
    gone.hold(0)
    gone.close()
    assert not shared.peers._held
