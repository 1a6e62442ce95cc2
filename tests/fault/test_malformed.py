"""Malformed HTTP/2, gRPC and protobuf, chosen at random, on the port of a router. The router process continues to
serve, does not grow, and writes no traceback. `./run bench hostile --attacks malformed` makes the same attack for
longer, and measures the calls of other clients."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import windrow
from proof.certificates import Authority
from proof.malformed import KINDS, call_of, conversation, say
from tests.access import open_secured
from tests.effort import SEED, luck_of, trials
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, until, write_cluster
from tests.streams import new_job
from windrow.v1 import queue_pb2

MIB = 1024 * 1024
CONVERSATIONS = trials(600, thorough=20_000)
AT_A_TIME = 16
GROWTH_MIB = 64

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    routers: Routers
    # The authority that signed the router's certificate; None: the router speaks no TLS.
    ca: Path | None
    # A key of a caller; None: the router does not ask callers who they are.
    key: str | None


@pytest.fixture(scope="module", params=["plain", "TLS and keys"])
def served(
    request: pytest.FixtureRequest, postgres: Server, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served, None, None]:
    folder = tmp_path_factory.mktemp("malformed")
    secure = request.param != "plain"
    dsn = postgres.create(f"malformed_{request.param[:3].lower()}")
    config = write_cluster(folder / "cluster.toml", {"s1": dsn}, memory_mib=512)
    if not secure:
        with running_routers(config) as routers:
            yield Served(routers=routers, ca=None, key=None)
        return
    authority = Authority()
    authority.sign().save(folder / "tls.crt", folder / "tls.key")
    tables = f"\n[auth]\n\n[tls]\ncertificate = '{folder / 'tls.crt'}'\nkey = '{folder / 'tls.key'}'\n"
    config.write_text(config.read_text() + tables)
    with running_routers(config) as routers, open_secured(routers, {"s1": dsn}) as cluster:
        yield Served(routers=routers, ca=authority.saved(folder / "ca.crt"), key=cluster.key_of("quiet"))


@pytest.mark.thorough
async def test_a_router_survives_whatever_comes_and_serves_others_meanwhile(served: Served) -> None:
    luck = luck_of("malformed")
    (pid,) = served.routers.pids
    before_mib = psutil.Process(pid).memory_info().rss // MIB
    valid = queue_pb2.EnqueueRequest(org="acme", jobs=[new_job(payload=b"payload")]).SerializeToString()
    drawn = [conversation(luck, valid=valid) for _ in range(CONVERSATIONS)]
    assert {one.kind for one in drawn} == set(KINDS)
    context = None
    if served.ca is not None:
        context = ssl.create_default_context(cafile=served.ca)
        context.set_alpn_protocols(["h2"])
    left = iter(enumerate(drawn))

    async def attack() -> None:
        for at, one in left:
            # If the port has TLS, every second attacker speaks plain text.
            await say(served.routers.address, one.sent, tls=context if at % 2 else None)

    async with windrow.Client(
        served.routers.address, org="quiet", tls=served.ca or False, token=served.key, timeout=PATIENCE_S
    ) as quiet:
        attacking = asyncio.gather(*(attack() for _ in range(AT_A_TIME)))
        rounds = 0
        while not attacking.done() or not rounds:
            await quiet.enqueue("mail", "greet", b"hello")
            (job,) = await quiet.dequeue("mail", wait=PATIENCE_S)
            await quiet.ack(job)
            rounds += 1
        await attacking
        assert served.routers.pids == [pid], f"seed {SEED!r}"
        await quiet.enqueue("mail", "greet", b"hello")
    await asyncio.to_thread(
        until,
        lambda: psutil.Process(pid).memory_info().rss // MIB < before_mib + GROWTH_MIB,
        f"the memory is given back, seed {SEED!r}",
    )
    assert "Traceback" not in served.routers.log.read_text(), f"seed {SEED!r}"


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(b"/\xa9", id="one byte"),
        pytest.param(b"\xff" * 100, id="many bytes"),
        pytest.param(b"", id="empty"),
        pytest.param(b"/windrow.v1.Queue/Enqueue\xc3", id="after a known name"),
    ],
)
async def test_a_method_whose_name_is_not_utf_8_ends_neither_the_router_nor_the_calls_of_others(
    served: Served, method: bytes
) -> None:
    (pid,) = served.routers.pids
    context = None
    if served.ca is not None:
        context = ssl.create_default_context(cafile=served.ca)
        context.set_alpn_protocols(["h2"])
    async with windrow.Client(
        served.routers.address, org="quiet", tls=served.ca or False, token=served.key, timeout=PATIENCE_S
    ) as quiet:
        waiting = asyncio.create_task(quiet.dequeue("sms", wait=PATIENCE_S))
        await quiet.enqueue("mail", "greet", b"hello")
        await say(served.routers.address, call_of(method), tls=context)
        await quiet.enqueue("sms", "greet", b"hello")
        (job,) = await waiting
        await quiet.ack(job)
    assert served.routers.pids == [pid]
    assert "Traceback" not in served.routers.log.read_text()
