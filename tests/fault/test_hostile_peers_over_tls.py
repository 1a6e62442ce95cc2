"""A router that speaks TLS knows how much each connection has sent. It closes the connections that hold its memory, and
no others. The bytes on its sockets are TLS records, which are longer than the messages in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

import windrow
from proof.certificates import Authority
from proof.hostile_peer import leave_requests_unfinished
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, until, write_cluster
from tests.tls_tunnel import tunnel

MIB = 1024 * 1024
MEMORY_MIB = 512
ENQUEUE = "/windrow.v1.Queue/Enqueue"

pytestmark = pytest.mark.timeout(300)


def resident_mib(routers: Routers) -> int:
    (pid,) = routers.pids
    return int(psutil.Process(pid).memory_info().rss) // MIB


async def test_unfinished_requests_over_tls_stay_within_the_memory_of_the_router_and_others_are_not_disturbed(
    postgres: Server, tmp_path: Path
) -> None:
    authority = Authority()
    authority.sign().save(tmp_path / "tls.crt", tmp_path / "tls.key")
    ca = authority.saved(tmp_path / "ca.crt")
    config = write_cluster(tmp_path / "cluster.toml", {"s1": postgres.create("hostile_tls")}, memory_mib=MEMORY_MIB)
    table = f"\n[tls]\ncertificate = '{tmp_path / 'tls.crt'}'\nkey = '{tmp_path / 'tls.key'}'\n"
    config.write_text(config.read_text() + table)
    with running_routers(config) as routers:
        async with (
            tunnel(routers.address, ca) as entrance,
            windrow.Client(
                # Each call has one try, so a call fails if its connection is closed.
                routers.address,
                org="quiet",
                tls=ca,
                timeout=PATIENCE_S,
                try_timeout=PATIENCE_S,
            ) as quiet,
        ):
            # This org has sent much more than the attackers may hold, and the router has handled all of it.
            for _ in range(100):
                await quiet.enqueue("large", "greet", bytes(MIB // 2))
            before = resident_mib(routers)
            attack = asyncio.create_task(
                leave_requests_unfinished(
                    entrance, ENQUEUE, size_bytes=15 * MIB, calls=120, connections=4, seconds=PATIENCE_S
                )
            )
            peak, rounds = before, 0
            waiting = asyncio.create_task(quiet.dequeue("nothing", wait=PATIENCE_S))
            while not attack.done():
                peak = max(peak, resident_mib(routers))
                await quiet.enqueue("small", "greet")
                rounds += 1
                await asyncio.wait({attack}, timeout=0.05)
            seen = attack.result()
            assert peak < MEMORY_MIB
            assert any(one.closed_after_s is not None for one in seen)
            assert rounds > 0
            # The call that waited all the time still runs, so its connection was not closed.
            assert not waiting.done() or waiting.exception() is None
            waiting.cancel()
            await asyncio.wait({waiting})
            await asyncio.to_thread(until, lambda: resident_mib(routers) < before + 64, "the memory is given back")
        assert "with unfinished requests of" in routers.log.read_text()


async def test_a_router_that_drains_closes_tls_connections(postgres: Server, tmp_path: Path) -> None:
    authority = Authority()
    authority.sign().save(tmp_path / "tls.crt", tmp_path / "tls.key")
    ca = authority.saved(tmp_path / "ca.crt")
    # The drain may take an hour, so the test fails if the router waits for it.
    config = write_cluster(tmp_path / "cluster.toml", {"s1": postgres.create("drain_tls")}, drain_seconds=3600)
    table = f"\n[tls]\ncertificate = '{tmp_path / 'tls.crt'}'\nkey = '{tmp_path / 'tls.key'}'\n"
    config.write_text(config.read_text() + table)
    with running_routers(config) as routers:
        async with windrow.Client(routers.address, org="quiet", tls=ca) as idle:
            await idle.server_info()
            routers.supervisor.terminate()
            assert await asyncio.to_thread(routers.supervisor.wait, PATIENCE_S) == 0
