"""Tests routers with PgBouncer between the routers and a shard. Session mode works. A pooler that shares sessions
between clients is refused, and the error says why."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from embedded.account import server_account, spawn
from embedded.ports import HOST, RememberedPort
from shard.errors import ShardUnavailable
from shard.health import facts
from shard.postgres import pool
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import OrgId
from tests.command import windrow
from tests.conftest import SHARD
from tests.jobs import job_id, job_message, some_jobs
from tests.routers import PATIENCE_S, running_routers, stubs, until, write_cluster
from tests.streams import window
from windrow.v1 import queue_pb2

REASON = re.escape("its DSN leads to a pooler that gives sessions to others after each transaction; use session mode")
CONFIG = """[databases]
* = host={host} port={server}
[pgbouncer]
listen_addr = {listen}
listen_port = {port}
unix_socket_dir =
auth_type = plain
auth_file = {users}
pool_mode = {mode}
default_pool_size = {size}
server_round_robin = {round_robin}
"""


@contextlib.contextmanager
def pgbouncer(dsn: str, mode: str, *, size: int = 20, round_robin: int = 0) -> Generator[str, None, None]:
    """Starts a pooler in front of the database. Yields the DSN that leads through the pooler."""
    program, holder = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin"), shutil.which("setpriv")
    if program is None or holder is None:
        pytest.skip("pgbouncer is not installed: apt-get install --no-install-recommends pgbouncer")
    server = conninfo_to_dict(dsn)
    account = server_account()
    with tempfile.TemporaryDirectory(prefix="windrow-pgbouncer-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        port = RememberedPort("pgbouncer", folder).pick()
        users = folder / "users.txt"
        users.write_text(f'"{server["user"]}" "{server["password"]}"\n')
        config = folder / "pgbouncer.ini"
        config.write_text(
            CONFIG.format(
                host=server.get("host", HOST), server=server["port"], listen=HOST, port=port, users=users, mode=mode,
                size=size, round_robin=round_robin,
            )
        )  # fmt: skip
        with (folder / "log").open("ab") as log:
            process = spawn([holder, "--pdeathsig", "KILL", program, config], account=account, output=log)
        try:
            until(lambda: b"process up" in (folder / "log").read_bytes(), "pgbouncer listens")
            yield make_conninfo(dsn, host=HOST, port=port)
        finally:
            process.kill()
            process.wait()


def test_routers_work_through_a_pooler_in_session_mode(module_dsn: str, org: OrgId, tmp_path: Path) -> None:
    with (
        pgbouncer(module_dsn, "session") as dsn,
        running_routers(write_cluster(tmp_path / "cluster.toml", {SHARD: dsn})) as routers,
        stubs(routers.address) as both,
    ):
        waiting = both.queue.Dequeue.future(
            queue_pb2.DequeueRequest(org=org, queues=["mail"], max_jobs=5, wait=window(20)), timeout=PATIENCE_S
        )
        jobs = [job_message(id=job_id(), queue="mail", kind="greet") for _ in range(5)]
        both.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs), timeout=PATIENCE_S)
        leased = list(waiting.result().jobs)
        while len(leased) < len(jobs):
            request = queue_pb2.DequeueRequest(org=org, queues=["mail"], max_jobs=5)
            leased += both.queue.Dequeue(request, timeout=PATIENCE_S).jobs
        acks = [queue_pb2.Ack(lease=job.lease) for job in leased]
        answers = both.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks), timeout=PATIENCE_S).answers
        assert len(answers) == len(jobs)
        both.books(SHARD)


async def test_a_pooler_in_session_mode_without_another_session_is_accepted(module_dsn: str, org: OrgId) -> None:
    with pgbouncer(module_dsn, "session", size=1) as dsn:
        database = Database(SHARD, dsn, connections=1)
        await database.open()
        try:
            assert await Store(database).enqueue(some_jobs(org)) == {}
        finally:
            await database.close()


@pytest.mark.parametrize(("mode", "round_robin"), [("transaction", 0), ("transaction", 1), ("statement", 0)])
async def test_a_pooler_that_shares_sessions_is_refused(
    module_dsn: str, org: OrgId, mode: str, round_robin: int
) -> None:
    with pgbouncer(module_dsn, mode, round_robin=round_robin) as dsn:
        database = Database(SHARD, dsn, connections=2)
        await database.open()
        try:
            with pytest.raises(ShardUnavailable, match=REASON):
                await Store(database).enqueue(some_jobs(org))
        finally:
            await database.close()
        with pytest.raises(ShardUnavailable, match=REASON):
            await facts.read(SHARD, dsn)


async def test_a_pooler_that_was_not_recognized_at_first_is_refused_when_clients_meet_in_a_session(
    module_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def miss(*_: object) -> None:
        """Finds no shared session, as the check may do while other clients use the pooler's sessions."""

    monkeypatch.setattr(pool, "refuse_shared_sessions", miss)
    with pgbouncer(module_dsn, "transaction", size=1) as dsn:
        first, second = (Database(SHARD, dsn, connections=1) for _ in range(2))
        await first.open()
        await second.open()
        try:
            assert await first.run(b"SELECT 1", {}) == [(1,)]
            with pytest.raises(ShardUnavailable, match=REASON):
                await second.run(b"SELECT 1", {})
        finally:
            await first.close()
            await second.close()


def test_a_router_and_the_doctor_say_that_the_pooler_shares_sessions(module_dsn: str, tmp_path: Path) -> None:
    with pgbouncer(module_dsn, "transaction") as dsn:
        config = write_cluster(tmp_path / "cluster.toml", {SHARD: dsn}, catalog_dsn=module_dsn)
        with running_routers(config) as routers:
            until(lambda: re.search(REASON, routers.log.read_text()), "the log says so")
        # The doctor checks only once. While a router connects at the same moment, this check may not find the pooler.
        done = windrow("doctor", "--shard", SHARD, "--config", str(config))
        assert done.code == 3
        assert re.search(REASON, done.err)
