"""Each peer that is installed, once through: stored, worked, counted. `pytest bench/peers`; installs nothing itself."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Generator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from bench.payloads import intact, stamped
from bench.peers.install import PEERS, default_cache, installed
from bench.system import Site, Wrong
from bench.systems import load
from embedded import Cluster, open_clusters

CACHE = default_cache()
JOBS = 1000
BATCH = 100


@pytest.fixture(scope="module")
def cluster() -> Generator[Cluster]:
    with open_clusters(["peers"], ephemeral=True) as clusters:
        yield clusters["peers"]


@pytest.fixture
def site(cluster: Cluster) -> Site:
    name = f"peer_{secrets.token_hex(4)}"
    with psycopg.connect(cluster.superuser_dsn, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" OWNER windrow'.encode())
    return Site(address="", dsns={}, dsn=make_conninfo(cluster.dsn, dbname=name), cache=str(CACHE), callers=2)


@pytest.mark.parametrize("peer", PEERS)
async def test_a_peer_gives_out_every_job_once_and_counts_them_all(peer: str, site: Site) -> None:
    if not installed(CACHE, peer):
        pytest.skip(f"{peer} is not in {CACHE}: python -m bench.peers.install {peer}")
    first, second = load(peer)(site), load(peer)(site)
    try:
        for batch in (BATCH, 1):
            jobs = JOBS if batch > 1 else 20
            run = f"run-{secrets.token_hex(4)}"
            for system in (first, second):
                await system.prepare(run)
            stored = [stamped(batch, at_ns=number) for number in range(jobs // batch)]
            for payloads in stored:
                await first.enqueue(payloads)
            assert await second.left() == jobs
            with pytest.raises(Wrong):
                await first.check(jobs)
            taken: list[bytes] = []
            done = 0
            all_done = asyncio.Event()

            def finished(count: int, jobs: int = jobs, all_done: asyncio.Event = all_done) -> None:
                nonlocal done
                done += count
                if done >= jobs:
                    all_done.set()

            def take(_at_ns: int, payload: bytes, taken: list[bytes] = taken) -> None:
                taken.append(payload)

            working = [
                asyncio.create_task(system.work(batch=batch, concurrency=2, taken=take, finished=finished))
                for system in (first, second)
            ]
            async with asyncio.timeout(30):
                await all_done.wait()
            for task in working:
                task.cancel()
            await asyncio.wait(working)
            assert all(task.cancelled() for task in working)
            assert (await first.left(), done) == (0, jobs)
            assert Counter(taken) == Counter(payload for payloads in stored for payload in payloads)
            assert all(map(intact, taken))
            await second.check(jobs)
            # graphile-worker deletes finished jobs, and keeps no count of them.
            if peer != "graphile-worker":
                with pytest.raises(Wrong):
                    await second.check(jobs + 1)
    finally:
        await first.close()
        await second.close()
