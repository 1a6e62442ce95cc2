"""A caller that has not proved who it is can use only a bounded amount of a router's connections, streams, header
bytes, time and log lines (SECURITY.md, "What one hostile client can do"). The tests run with and without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncGenerator, Awaitable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proof.certificates import Authority
from proof.hostile_peer import (
    Seen,
    Silence,
    drip,
    flood_with_pings,
    open_peer,
    reset_rapidly,
    say_nothing,
    send_large_headers,
)
from router.gate.connection_limit import accepted_max
from shard.admin import api_keys
from shard.postgres.pool import Database
from shard.vocabulary import CATALOG
from tests.access import ALL, bearer
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, until, write_cluster
from tests.streams import until as until_async
from tests.tls_tunnel import tunnel
from windrow.v1 import cluster_pb2, cluster_pb2_grpc

pytestmark = pytest.mark.timeout(300)

MIB = 1024 * 1024
MEMORY_MIB = 512
CONNECTIONS_MAX = 100
# How much the memory of a router may grow while the router refuses calls.
GROWTH_MIB = 64
ENQUEUE, CHECK, WATCH = "/windrow.v1.Queue/Enqueue", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED = (
    code.value[0]
    for code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    )
)
# An address of this machine. Other callers come from 127.0.0.1.
ATTACKER = "127.0.0.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """A router that asks each caller who it is. `ca`: the authority that signed the router's certificate; None: the
    router speaks no TLS."""

    routers: Routers
    ca: Path | None
    dsn: str

    async def operators_key(self) -> str:
        """Creates a key with all scopes for all orgs."""
        catalog = Database(CATALOG, self.dsn, connections=1)
        await catalog.open()
        try:
            return (await api_keys.create(catalog, org=None, scopes=ALL, name="", expires_in_s=None))[1]
        finally:
            await catalog.close()

    @contextlib.asynccontextmanager
    async def for_peers(self) -> AsyncGenerator[str, None]:
        """Yields an address for peers that speak no TLS themselves."""
        if self.ca is None:
            yield self.routers.address
            return
        async with tunnel(self.routers.address, self.ca) as address:
            yield address

    @contextlib.asynccontextmanager
    async def health(self) -> AsyncGenerator[Any, None]:
        """Yields a stub of the health service, over a connection of its own."""
        async with self.channel() as channel:
            # The published type stubs do not have the methods of the gRPC stub.
            yield health_pb2_grpc.HealthStub(channel)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncGenerator[grpc.aio.Channel, None]:
        """Yields a channel with a connection of its own."""
        address, options = self.routers.address, [("grpc.use_local_subchannel_pool", 1)]
        channel = (
            grpc.aio.insecure_channel(address, options=options)
            if self.ca is None
            else grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.ca.read_bytes()), options=options)
        )
        async with channel:
            yield channel

    @property
    def process(self) -> psutil.Process:
        (pid,) = self.routers.pids
        return psutil.Process(pid)

    def resident_mib(self) -> int:
        return int(self.process.memory_info().rss) // MIB

    def connections(self) -> int:
        port = int(self.routers.address.split(":")[1])
        found = self.process.net_connections("tcp")
        return sum(1 for one in found if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED)


@pytest.fixture(scope="module")
def entrances(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, Entrance], None, None]:
    with contextlib.ExitStack() as stack:
        yield {
            kind: stack.enter_context(opened(kind, postgres, tmp_path_factory.mktemp("bounds")))
            for kind in ("plain", "TLS")
        }


@pytest.fixture(scope="module", params=["plain", "TLS"])
def entrance(request: pytest.FixtureRequest, entrances: dict[str, Entrance]) -> Entrance:
    return entrances[request.param]


@contextlib.contextmanager
def opened(kind: str, postgres: Server, folder: Path) -> Generator[Entrance, None, None]:
    dsn = postgres.create(f"bounds_{kind.lower()}")
    config = write_cluster(
        folder / "cluster.toml", {"s1": dsn}, memory_mib=MEMORY_MIB, client_connections=CONNECTIONS_MAX
    )
    tables, ca = "\n[auth]\napi_keys = true\n", None
    if kind == "TLS":
        authority = Authority()
        authority.sign().save(folder / "tls.crt", folder / "tls.key")
        ca = authority.saved(folder / "ca.crt")
        tables += f"\n[tls]\ncertificate = '{folder / 'tls.crt'}'\nkey = '{folder / 'tls.key'}'\n"
    config.write_text(config.read_text() + tables)
    with running_routers(config) as routers:
        yield Entrance(routers=routers, ca=ca, dsn=dsn)


def is_closed(connection: socket.socket) -> bool:
    """Returns whether the router has closed a connection. Reads and drops what the router has sent."""
    try:
        while connection.recv(1 << 16, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


async def check(health: Any, service: str = "") -> None:
    """Asks whether the router serves. Raises grpc.aio.AioRpcError."""
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await health.Check(request, timeout=PATIENCE_S, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def peak_mib(entrance: Entrance, attack: Awaitable[list[Seen]]) -> tuple[int, list[Seen]]:
    """Returns the router's peak memory during an attack, and what the attackers saw. During the attack, another caller
    asks again and again whether the router serves."""
    attacking = asyncio.ensure_future(attack)
    peak = 0
    async with entrance.health() as health:
        while not attacking.done():
            peak = max(peak, entrance.resident_mib())
            await check(health)
            await asyncio.wait({attacking}, timeout=0.02)
        await check(health)
    return peak, attacking.result()


# ── Connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_host_that_opens_connections_without_end_takes_none_from_others(entrance: Entrance) -> None:
    host, port = entrance.routers.address.split(":")
    async with entrance.for_peers() as address, contextlib.AsyncExitStack() as stack:
        before = [await stack.enter_async_context(open_peer(address)) for _ in range(10)]
        health = await stack.enter_async_context(entrance.health())
        await check(health)
        floods: list[socket.socket] = []
        for _ in range(3 * CONNECTIONS_MAX):
            with contextlib.suppress(OSError):
                floods.append(socket.create_connection((host, int(port)), PATIENCE_S, source_address=(ATTACKER, 0)))
                stack.enter_context(floods[-1])
        # gRPC never accepts more connections than `accepted_max`, its own bound.
        assert entrance.connections() <= accepted_max(CONNECTIONS_MAX)
        await until_async(
            lambda: sum(not is_closed(one) for one in floods) <= CONNECTIONS_MAX - len(before),
            "the connections that are too many are closed",
        )
        assert not any(peer.closed for peer in before)
        # The router has room for a new caller, and earlier callers can continue.
        async with entrance.health() as another:
            await check(another)
        await check(health)
    said = entrance.routers.log.read_text()
    assert f"more than {CONNECTIONS_MAX} client connections, most of them of {ATTACKER}" in said


async def test_connections_that_say_nothing_or_not_enough_are_closed(entrances: dict[str, Entrance]) -> None:
    # Each of these connections lasts as long as a router allows, up to 40 s. So the test makes all of them at the same
    # time.
    async with contextlib.AsyncExitStack() as stack:
        addresses = {kind: await stack.enter_async_context(one.for_peers()) for kind, one in entrances.items()}
        group = await stack.enter_async_context(asyncio.TaskGroup())
        attacks = dict[str, asyncio.Task[list[Seen]]]()
        for kind, address in addresses.items():
            for silence in Silence:
                attack = say_nothing(address, silence, connections=5, seconds=PATIENCE_S)
                attacks[f"{silence.value}, {kind}"] = group.create_task(attack)
            # The call that is sent byte by byte would be complete only after minutes.
            attack = drip(address, CHECK, connections=5, seconds=PATIENCE_S, every_s=2.0)
            attacks[f"byte by byte, {kind}"] = group.create_task(attack)
            group.create_task(until_an_unfinished_tls_handshake_is_ended(entrances[kind]))
    still_open = [
        name for name, attack in attacks.items() if any(one.closed_after_s is None for one in attack.result())
    ]
    assert still_open == []


async def until_an_unfinished_tls_handshake_is_ended(entrance: Entrance) -> None:
    host, port = entrance.routers.address.split(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        # The head of a TLS record that announces 512 bytes.
        connection.sendall(b"\x16\x03\x01\x02\x00\x01")
        await until_async(lambda: is_closed(connection), "the router ends a TLS handshake that is not finished")


async def test_a_flood_of_pings_ends_its_connection(entrance: Entrance) -> None:
    async with entrance.for_peers() as address:
        peak, seen = await peak_mib(
            entrance, flood_with_pings(address, count=20_000, connections=3, seconds=PATIENCE_S)
        )
    # A reset may overtake the GOAWAY.
    assert all(one.closed_after_s is not None for one in seen)
    assert peak < entrance.resident_mib() + GROWTH_MIB


# ── Calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_streams_of_strangers_leave_room_for_others(entrance: Entrance) -> None:
    async with entrance.for_peers() as address, open_peer(address) as peer, entrance.health() as health:
        for _ in range(1_500):
            await peer.call(WATCH, b"")

        # At most 250 streams remain. This is half of the 500 streams that all callers without proof share. gRPC resets
        # the calls above `calls_per_connection`.
        await peer.until(lambda seen: seen.statuses.total() + seen.resets.total() >= 1_250, within_s=PATIENCE_S)
        assert peer.seen.statuses.keys() == {RESOURCE_EXHAUSTED}
        assert peer.seen.resets.total() > 0
        await check(health)


async def test_a_watch_that_is_not_read_holds_up_no_other_watch(entrance: Entrance) -> None:
    async with entrance.for_peers() as address, open_peer(address) as peer:
        # The router cannot send its answer, because the peer grants it no bytes.
        await peer.call(WATCH, b"")
        await peer.until(lambda seen: seen.answering, within_s=PATIENCE_S)
        async with entrance.health() as health:
            watch = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            answer = await watch.read()
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            # The peer's connection ends after 30 s. The answer to the other caller did not wait for that.
            await peer.heard()
            assert not peer.closed


async def test_large_calls_of_strangers_take_no_memory_of_others(entrance: Entrance) -> None:
    key = await entrance.operators_key()
    async with entrance.for_peers() as address, contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(open_peer(address, window_bytes=65_535)) for _ in range(4)]
        for peer in peers:
            for _ in range(10):
                # The request has a field of 1 MiB that the contract does not know.
                await peer.call(WATCH, b"\x7a\x80\x80\x40" + bytes(MIB))
        async with entrance.channel() as channel:
            answer = await cluster_pb2_grpc.ClusterStub(channel).ListShards(
                cluster_pb2.ListShardsRequest(), metadata=bearer(key), timeout=PATIENCE_S, wait_for_ready=True
            )
        assert answer.shards
        for peer in peers:
            await peer.until(lambda seen: seen.statuses.total() == 10, within_s=PATIENCE_S)
            assert peer.seen.statuses.keys() == {INVALID_ARGUMENT}


@pytest.mark.turns(3)
@pytest.mark.parametrize("acknowledges", [True, False])
@pytest.mark.parametrize("field_bytes", [(17_000,), (17_000, 40_000), (4_000,) * 5, (1_000_000,)])
async def test_headers_beyond_the_bound_stay_within_the_memory_of_the_router(
    entrance: Entrance, field_bytes: tuple[int, ...], acknowledges: bool
) -> None:
    # A peer that does not read does not acknowledge the bound of headers. Then gRPC accepts headers of up to 16 MiB.
    async with entrance.for_peers() as address:
        attack = send_large_headers(
            address, ENQUEUE, field_bytes=field_bytes, calls=2_000, connections=10, seconds=5.0, reads=acknowledges
        )
        peak, seen = await peak_mib(entrance, attack)
    assert peak < MEMORY_MIB
    # The router closes the connection at the first call with such headers that it sees. After the acknowledgement, gRPC
    # itself refuses these calls. A peer that has sent all its calls may leave before it sees the refusals or the close.
    assert any(one.closed_after_s is not None or one.statuses[RESOURCE_EXHAUSTED] for one in seen)
    await asyncio.to_thread(
        until, lambda: entrance.resident_mib() < MEMORY_MIB // 2, "the memory is given back", within_s=PATIENCE_S
    )


async def test_calls_that_are_reset_at_once_cost_little_memory(entrance: Entrance) -> None:
    before = entrance.resident_mib()
    async with entrance.for_peers() as address:
        attack = reset_rapidly(address, ENQUEUE, count=10_000, connections=2, seconds=PATIENCE_S)
        peak, seen = await peak_mib(entrance, attack)
    # Either gRPC refuses the calls above the limit of a connection, or the router closes the connection. How many calls
    # are above the limit depends on how fast the router handles the calls.
    assert all(one.closed_after_s is not None or one.resets.total() > 0 for one in seen)
    assert peak < before + GROWTH_MIB


async def test_compressed_messages_are_refused_before_they_are_decompressed(entrance: Entrance) -> None:
    # Each message has 16 MiB of zeros.
    bomb = gzip.compress(bytes(16 * MIB))
    before = entrance.resident_mib()

    async def attack(address: str) -> list[Seen]:
        async with open_peer(address, window_bytes=65_535) as peer:
            for _ in range(100):
                await peer.call(CHECK, bomb, fields=[(b"grpc-encoding", b"gzip")], compressed=True)
            await peer.until(lambda seen: seen.statuses.total() == 100, within_s=PATIENCE_S)
        return [peer.seen]

    async with entrance.for_peers() as address:
        peak, (seen,) = await peak_mib(entrance, attack(address))
    assert seen.statuses == {UNIMPLEMENTED: 100}
    assert peak < before + GROWTH_MIB


# ── The log ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_strangers_write_next_to_nothing_into_the_log(entrance: Entrance) -> None:
    log = entrance.routers.log
    before = len(log.read_text())
    async with entrance.health() as health:
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(health, "no.such.Service")
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    async with entrance.for_peers() as address, open_peer(address, window_bytes=65_535) as peer:
        for name in (b"authorization", b"x-other", b"windrow-org"):
            await peer.call(ENQUEUE, b"", fields=[(name, b"Bearer wr_secret-\xff\xfe")])
        await peer.until(lambda seen: seen.statuses.total() == 3, within_s=PATIENCE_S)
    said = log.read_text()[before:]
    assert "wr_secret" not in said
    assert "Traceback" not in log.read_text()
    # The log has at most one line: once a minute it counts the refused calls.
    assert len(said.splitlines()) <= 1
