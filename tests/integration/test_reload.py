"""The cluster file changes while routers run. The tests show which files are refused, which changes are applied, and
that clients of other shards notice nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration
from psycopg.conninfo import conninfo_to_dict

from cli.main import main
from shard.placement.cluster_file import digest_of
from shard.placement.slots import slot_of
from shard.vocabulary import OrgId
from tests.integration.test_router import (
    OK,
    QUEUE,
    Running,
    assert_unavailable,
    dequeue,
    enqueue,
    found,
    locked_jobs,
    new_job,
    refusal,
    succeeds,
)
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, ending, running_routers, stubs, until
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2

Shards = Mapping[str, Mapping[str, object]]
_numbers = itertools.count(1)


class Live(Running):
    """A cluster whose file a test rewrites again and again."""

    def write(self, shards: Shards, more: str = "") -> str:
        """Replaces the cluster file. Returns the digest of the new file."""
        return self.put(cluster_text(shards, more))

    def put(self, text: str) -> str:
        other = self.routers.config.with_suffix(".new")
        other.write_text(text)
        os.replace(other, self.routers.config)
        return digest_of(text)

    def change(self, shards: Shards, more: str = "") -> None:
        """Replaces the cluster file, and waits until the router uses the new file."""
        digest = self.write(shards, more)
        until(lambda: self.file().digest == digest, f"the file is in use: {self.file()}")

    def listed(self) -> cluster_pb2.ListShardsResponse:
        return self.stubs.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S)

    def file(self) -> cluster_pb2.ClusterFile:
        return self.listed().cluster_file

    def refused(self, digest: str) -> str:
        """Waits until the file with this digest is refused. Returns the reason."""
        until(lambda: self.file().refusal.digest == digest, "the file is refused")
        return self.file().refusal.reason

    def info(self, shard: str) -> cluster_pb2.ShardInfo:
        return next(one for one in self.listed().shards if one.name == shard)

    def log(self) -> str:
        return self.routers.log.read_text()

    def said(self, words: str, *, times: int = 1) -> None:
        until(lambda: self.log().count(words) >= times, f"the log says {words!r}, {times} time(s)")

    def as_they_are(self, **others: Mapping[str, object]) -> dict[str, dict[str, object]]:
        """Returns the table of each shard in the cluster file: the shard's DSN, and the given settings."""
        return {name: {"dsn": dsn, **others.get(name, {})} for name, dsn in self.dsns.items()}


def cluster_text(shards: Shards, more: str = "") -> str:
    text = '[cluster]\nname = "tests"\n'
    for name, keys in shards.items():
        text += f"\n[[shard]]\nname = '{name}'\n"
        text += "".join(
            f"{key} = '''{value}'''\n" if isinstance(value, str) else f"{key} = {value}\n"
            for key, value in keys.items()
        )
    return f"{text}\n{more}"


@pytest.fixture
def databases(postgres: Server) -> Generator[dict[str, str], None, None]:
    """Makes two empty databases that only one test uses."""
    test = f"reload_{next(_numbers)}"
    names = {shard: f"{test}_{shard}" for shard in ("s1", "s2")}
    yield {shard: postgres.create(name) for shard, name in names.items()}
    for name in names.values():
        postgres.drop(name)


@contextlib.contextmanager
def live(dsns: Mapping[str, str], folder: Path, *, processes: int = 1) -> Generator[Live, None, None]:
    config = folder / "cluster.toml"
    config.write_text(cluster_text({name: {"dsn": dsn} for name, dsn in dsns.items()}))
    with running_routers(config, processes=processes) as routers, stubs(routers.address) as both:
        yield Live(dsns=dsns, routers=routers, stubs=both)


@pytest.fixture
def cluster(databases: dict[str, str], tmp_path: Path) -> Generator[Live, None, None]:
    with live(databases, tmp_path) as running:
        yield running


def place(cluster: Live, orgs_slot: int | None, *, writes: str, reads: list[str]) -> None:
    """Writes the placement of one slot (None: of all slots) to the catalog, as a balancer does."""
    # All changes are in one transaction, because a router that has read the new epoch looks only for changes after that
    # epoch.
    changed = cluster.sql(
        "s1",
        "WITH counted AS (UPDATE windrow.catalog SET epoch = epoch + 1 RETURNING epoch) "
        "UPDATE windrow.placement p SET writes = ARRAY[%s], reads = %s::text[], epoch = c.epoch, changed = c.epoch "
        "FROM counted c WHERE p.slot = coalesce(%s, p.slot) RETURNING c.epoch",
        *(writes, reads, orgs_slot),
    )
    epoch = changed[0][0]
    if writes in cluster.dsns:
        cluster.sql(
            writes,
            "INSERT INTO windrow.owned_slot SELECT n, 'owned', %s FROM generate_series(0, 16383) AS n "
            "WHERE n = coalesce(%s, n) ON CONFLICT (slot) DO UPDATE SET state = 'owned', epoch = excluded.epoch",
            *(epoch, orgs_slot),
        )


def connections_to(postgres: Server, dsn: str) -> int:
    with psycopg.connect(postgres.superuser_dsn) as watcher:
        row = watcher.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name LIKE 'windrow%%'",
            [conninfo_to_dict(dsn)["dbname"]],
        ).fetchone()
    assert row is not None
    return int(row[0])


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bad_file_is_refused_once_in_the_log_and_the_one_before_stays_in_force(cluster: Live) -> None:
    good = cluster.file().digest
    org = cluster.org_on("s2")
    why = cluster.refused(cluster.put("[[shard]\n"))
    assert why.startswith(f"{cluster.routers.config}: not TOML: ")
    # The router tries the file again and again, but logs the refusal once.
    first = cluster.file().refusal.last_tried_at.ToNanoseconds()
    until(lambda: cluster.file().refusal.last_tried_at.ToNanoseconds() > first, "the file is tried again")
    assert cluster.log().count("the cluster file is refused") == 1
    enqueue(cluster.stubs, org)
    assert (cluster.file().digest, [one.reachable for one in cluster.listed().shards]) == (good, [True, True])
    why = cluster.refused(cluster.write(cluster.as_they_are(s2={"weight": -1})))
    assert (
        why == f"{cluster.routers.config}: [[shard]] number 2 (s2): weight must be a number from 0 to 1000000, not -1"
    )
    cluster.said("the cluster file is refused", times=2)
    why = cluster.refused(cluster.write(cluster.as_they_are(), "[router]\nprocesses = 0\nlisten = 1\n"))
    assert "[router] processes: must be a whole number from 1 to 256, not 0" in why
    assert "[router] listen: must be HOST:PORT, such as 127.0.0.1:7419, not 1" in why
    cluster.routers.config.unlink()
    until(lambda: "No such file" in cluster.file().refusal.reason, "the lack of a file is noticed")
    cluster.change(cluster.as_they_are(s2={"weight": 5}))
    assert not cluster.file().HasField("refusal")
    assert cluster.info("s2").weight == 5
    password = conninfo_to_dict(cluster.dsns["s1"])["password"]
    assert password
    assert str(password) not in cluster.log()


def test_a_shard_that_holds_slots_is_not_forgotten_until_it_holds_none(cluster: Live, postgres: Server) -> None:
    org = cluster.org_on("s2")
    without = {"s1": {"dsn": cluster.dsns["s1"]}}
    digest = cluster.write(without)
    assert cluster.refused(digest) == (
        f"{cluster.routers.config}: shard 's2' was removed from it, but still holds 8,192 slots: put it back with "
        'state = "draining", and wait until `windrow shards` shows 0 for it'
    )
    enqueue(cluster.stubs, org)
    # If routers forgot a shard from which they still read jobs, these jobs would be lost.
    place(cluster, None, writes="s1", reads=["s1", "s2"])
    until(lambda: "still holds 16,384 slots" in cluster.file().refusal.reason, "what is on its way counts")
    assert (cluster.info("s2").slots, cluster.info("s2").leaving_slots) == (0, 16_384)
    place(cluster, None, writes="s1", reads=["s1"])
    until(lambda: cluster.file().digest == digest, "the same file is taken up, for nothing is in its way any more")
    assert [one.name for one in cluster.listed().shards] == ["s1"]
    assert cluster.org_on("s1")
    until(lambda: connections_to(postgres, cluster.dsns["s2"]) == 0, "the shard is left")


def test_another_catalog_and_another_name_take_a_restart(cluster: Live) -> None:
    shards = cluster.as_they_are()
    elsewhere = f"[catalog]\ndsn = '''{cluster.dsns['s2']}'''\n"
    assert "needs a restart of every router" in cluster.refused(cluster.write(shards, elsewhere))
    turned = {name: shards[name] for name in ("s2", "s1")}
    assert "needs a restart of every router" in cluster.refused(cluster.write(turned))
    other = cluster_text(shards).replace('"tests"', '"others"')
    assert "[cluster] name is 'others'" in cluster.refused(cluster.put(other))
    # This [catalog] table names the same database as before, so no restart is needed.
    cluster.change(shards, f"[catalog]\ndsn = '''{cluster.dsns['s1']}'''\n")


def test_a_change_of_a_startup_setting_is_reported_to_need_a_restart(cluster: Live) -> None:
    cluster.change(cluster.as_they_are(), '[router]\nlisten = "127.0.0.1:1"\ndrain_seconds = 3\n')
    assert list(cluster.file().needs_restart) == ["[router] listen", "[router] drain_seconds"]
    cluster.said("[router] listen takes a restart of this router; [router] drain_seconds takes")
    cluster.change(cluster.as_they_are())
    assert list(cluster.file().needs_restart) == []


def test_a_shard_that_only_the_catalog_knows_is_unavailable_and_hurts_no_other(cluster: Live) -> None:
    near, far = cluster.org_on("s1"), cluster.org_on("s2")
    place(cluster, slot_of(OrgId(far)), writes="s9", reads=["s9"])
    until(lambda: not succeeds(lambda: enqueue(cluster.stubs, far)), "the router learns of it")
    error = refusal(lambda: enqueue(cluster.stubs, far))
    assert_unavailable(error)
    assert "shard 's9' is unavailable: the cluster file of this router does not name it" in (error.details() or "")
    enqueue(cluster.stubs, near)
    info = cluster.info("s9")
    assert (info.slots, info.reachable, info.state) == (1, False, cluster_pb2.SHARD_STATE_NOT_IN_FILE)


# ── What is applied ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_shard_that_is_added_comes_up_and_disturbs_nobody(
    cluster: Live, databases: dict[str, str], empty_dsn: str
) -> None:
    org, job = cluster.org_on("s1"), new_job()
    enqueue(cluster.stubs, org)
    used = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'windrow'"
    before = set(cluster.sql("s1", used))
    with locked_jobs(databases["s1"]) as waiting:
        call = cluster.stubs.queue.Enqueue.future(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
        until(lambda: waiting() == 1, "a call is in flight")
        cluster.change({**cluster.as_they_are(), "s3": {"dsn": empty_dsn, "weight": 3}})
        until(lambda: cluster.info("s3").reachable, "the new shard is up")
        assert not call.done()
    assert call.result(PATIENCE_S).results[0].id == job.id
    assert set(cluster.sql("s1", used)) >= before, "every connection of the others is the one it was"
    info = cluster.info("s3")
    assert (info.slots, info.weight, info.state) == (0, 3, cluster_pb2.SHARD_STATE_ACTIVE)
    assert info.schema_version > 0
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT cluster, shard FROM windrow.identity").fetchall() == [("tests", "s3")]
    cluster.said("shard 's3' is added")
    # The new shard holds no slot, so it may be removed at once.
    cluster.change(cluster.as_they_are())
    assert [one.name for one in cluster.listed().shards] == ["s1", "s2"]
    cluster.said("shard 's3' is removed")


def test_an_added_shard_that_cannot_be_reached_is_told_and_mended(
    cluster: Live, postgres: Server, empty_dsn: str
) -> None:
    org = cluster.org_on("s1")
    cluster.change({**cluster.as_they_are(), "s3": {"dsn": postgres.dsn("no_such_database")}})
    until(lambda: 'database "no_such_database" does not exist' in cluster.info("s3").error, "the trouble is told")
    enqueue(cluster.stubs, org)
    cluster.change({**cluster.as_they_are(), "s3": {"dsn": empty_dsn}})
    until(lambda: cluster.info("s3").reachable, "the mended shard is up")


@pytest.fixture
def moved(databases: dict[str, str], tmp_path: Path, postgres: Server) -> Generator[tuple[Live, str, Path], None, None]:
    """Yields a cluster, the DSN of a copy of s2's database, and the file that has the DSN of s2. The copy looks as if
    the database of s2 had been moved to another host."""
    with live(databases, tmp_path):
        pass
    copy = f"{conninfo_to_dict(databases['s2'])['dbname']}_copy"
    until(lambda: connections_to(postgres, databases["s2"]) == 0, "the routers have gone")
    dsn = postgres.create(copy, template=str(conninfo_to_dict(databases["s2"])["dbname"]))
    secret = tmp_path / "s2.dsn"
    secret.write_text(databases["s2"])
    config = tmp_path / "cluster.toml"
    config.write_text(cluster_text({"s1": {"dsn": databases["s1"]}, "s2": {"dsn_file": str(secret)}}))
    with running_routers(config) as routers, stubs(routers.address) as both:
        yield Live(dsns={**databases, "copy": dsn}, routers=routers, stubs=both), dsn, secret
    postgres.drop(copy)


def test_a_shard_goes_over_to_another_dsn_and_calls_in_flight_end(
    moved: tuple[Live, str, Path], postgres: Server
) -> None:
    cluster, dsn, secret = moved
    org, before, after = cluster.org_on("s2"), new_job(), new_job()
    wait = queue_pb2.DequeueRequest(org=org, queues=["other"], wait=Duration(seconds=60))
    with ThreadPoolExecutor(1) as threads, locked_jobs(cluster.dsns["s2"]) as waiting:
        parked = threads.submit(cluster.stubs.queue.Dequeue, wait, timeout=PATIENCE_S)
        call = cluster.stubs.queue.Enqueue.future(queue_pb2.EnqueueRequest(org=org, jobs=[before]), timeout=PATIENCE_S)
        until(lambda: waiting() >= 1, "a call is in flight")
        secret.write_text(dsn)
        cluster.said("shard 's2' is reached by its new DSN")
        enqueue(cluster.stubs, org, after)
        assert (after.id,) in cluster.sql("copy", "SELECT id::text FROM windrow.job")
        # By now, the consumer waits for jobs of the new database.
        enqueue(cluster.stubs, org, new_job(queue="other"))
        assert len(parked.result(PATIENCE_S).jobs) == 1
    assert call.result(PATIENCE_S).results[0].id == before.id
    # A statement that waits for a lock is repeated after a short time. So the call may have stored its job in the new
    # database.
    stored = [row for place in ("s2", "copy") for row in cluster.sql(place, "SELECT id::text FROM windrow.job")]
    assert stored.count((before.id,)) == 1
    assert stored.count((after.id,)) == 1
    until(lambda: connections_to(postgres, cluster.dsns["s2"]) == 0, "nothing is left at the old place")
    assert (cluster.info("s2").reachable, cluster.info("s2").error) == (True, "")


def test_a_dsn_that_leads_to_no_shard_is_not_gone_over_to(
    cluster: Live,
    postgres: Server,
    empty_dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["windrow", "shards", "--address", cluster.routers.address])
    org = cluster.org_on("s2")
    for dsn, trouble in (
        (postgres.dsn("no_such_database"), 'database "no_such_database" does not exist'),
        (empty_dsn, "its DSN leads to the database of no shard"),
        (cluster.dsns["s1"], "its DSN leads to the database of shard 's1' of cluster 'tests'"),
    ):
        cluster.change({**cluster.as_they_are(), "s2": {"dsn": dsn}})
        until(lambda trouble=trouble: trouble in cluster.info("s2").error, f"it is told: {trouble}")  # type: ignore[misc]
        assert cluster.info("s2").error.startswith("its new DSN is not in use yet: ")
        # The router still uses the old database.
        assert cluster.info("s2").reachable
        enqueue(cluster.stubs, org)
        with pytest.raises(SystemExit) as ended:
            main()
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("s2 ")]
        assert (ended.value.code, trouble in line) == (1, True)
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT to_regnamespace('windrow')").fetchall() == [(None,)], "it was only looked at"
    cluster.change(cluster.as_they_are())
    assert (cluster.info("s2").reachable, cluster.info("s2").error) == (True, "")


def test_the_catalog_is_followed_with_the_shard_that_it_is_on(
    databases: dict[str, str], tmp_path: Path, postgres: Server
) -> None:
    with live(databases, tmp_path):
        pass
    copy = f"{conninfo_to_dict(databases['s1'])['dbname']}_copy"
    until(lambda: connections_to(postgres, databases["s1"]) == 0, "the routers have gone")
    dsn = postgres.create(copy, template=str(conninfo_to_dict(databases["s1"])["dbname"]))
    try:
        with live(databases, tmp_path) as cluster:
            cluster.change(cluster.as_they_are(s1={"dsn": dsn}))
            cluster.said("shard 's1' is reached by its new DSN")
            until(lambda: connections_to(postgres, databases["s1"]) == 0, "nothing is left at the old place")
            after = Live(dsns={**databases, "s1": dsn}, routers=cluster.routers, stubs=cluster.stubs)
            place(after, None, writes="s1", reads=["s1"])
            until(lambda: after.info("s1").slots == 16_384, "the router reads the catalog there")
    finally:
        postgres.drop(copy)


def write_unnoticed(config: Path, text: str) -> None:
    """Changes the content of the file, but neither its size nor its time."""
    marks = config.stat()
    assert len(text.encode()) == marks.st_size
    config.write_text(text)
    os.utime(config, ns=(marks.st_atime_ns, marks.st_mtime_ns))


def test_a_hangup_has_every_process_read_the_file(databases: dict[str, str], tmp_path: Path) -> None:
    with live(databases, tmp_path, processes=2) as cluster:
        shards = cluster.as_they_are(s2={"weight": 1})
        digest = cluster.write(shards)
        cluster.said(f"cluster file {digest} is now in use", times=2)
        again = cluster_text(cluster.as_they_are(s2={"weight": 7}))
        write_unnoticed(cluster.routers.config, again)
        cluster.routers.supervisor.send_signal(signal.SIGHUP)
        cluster.said(f"cluster file {digest_of(again)} is now in use: shard 's2': its weight is 7, and was 1", times=2)
        assert cluster.info("s2").weight == 7
        assert len(cluster.routers.pids) == 2


def test_a_process_that_dies_while_the_file_is_bad_comes_back_when_it_is_mended(
    databases: dict[str, str], tmp_path: Path
) -> None:
    with live(databases, tmp_path, processes=2) as cluster:
        org, good = cluster.org_on("s1"), cluster.routers.config.read_text()
        cluster.put("[[shard]\n")
        cluster.said("the cluster file is refused", times=2)
        victim = min(cluster.routers.pids)
        with ending([victim]):
            os.kill(victim, signal.SIGKILL)
        cluster.said("ended with 78; starting another", times=2)
        assert cluster.routers.supervisor.poll() is None
        with stubs(cluster.routers.address) as both:
            enqueue(both, org)
        cluster.put(good)
        until(lambda: listening(cluster.routers) == 2, "both processes serve again")


def listening(routers: Routers) -> int:
    """Returns how many router processes accept connections."""
    return sum(
        any(one.status == psutil.CONN_LISTEN for one in psutil.Process(pid).net_connections("tcp"))
        for pid in routers.pids
    )


# ── States ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def held(cluster: Live, org: str) -> job_pb2.LeasedJob:
    enqueue(cluster.stubs, org)
    (leased,) = dequeue(cluster.stubs, org)
    return leased


def ack(cluster: Live, org: str, leased: job_pb2.LeasedJob) -> object:
    request = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=leased.lease)])
    return list(cluster.stubs.queue.Ack(request, timeout=PATIENCE_S).answers)


def assert_forbidden(call: Callable[[], object], state: str, what: str) -> None:
    error = refusal(call)
    assert_unavailable(error)
    # The reason names the state, because the router did not ask the shard.
    assert error.details() == f"shard 's2' is unavailable: its state is {state}, and it {what}"


def look(cluster: Live, org: str, job: str) -> None:
    """Makes one call of every method that only reads."""
    admin = cluster.stubs.admin
    assert found(cluster.stubs, org, job).jobs[0].id == job
    assert admin.GetStats(admin_pb2.GetStatsRequest(org=org), timeout=PATIENCE_S).queues
    assert admin.GetQueue(admin_pb2.GetQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S).queue.queue == QUEUE
    request = admin_pb2.ListJobsRequest(org=org, queue=QUEUE, state=job_pb2.JOB_STATE_READY)
    assert job in [one.id for one in admin.ListJobs(request, timeout=PATIENCE_S).jobs]
    assert cluster.stubs.books("s2")


def test_a_shard_that_drains_serves_and_has_no_share(cluster: Live) -> None:
    org = cluster.org_on("s2")
    cluster.change(cluster.as_they_are(s2={"state": "draining"}))
    assert cluster.info("s2").state == cluster_pb2.SHARD_STATE_DRAINING
    assert ack(cluster, org, held(cluster, org)) == [OK]


def test_a_shard_that_only_takes_gives_no_jobs_until_it_does_again(cluster: Live) -> None:
    near, org = cluster.org_on("s1"), cluster.org_on("s2")
    leased = held(cluster, org)
    wait = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], wait=Duration(seconds=60))
    with ThreadPoolExecutor(1) as threads:
        parked = threads.submit(cluster.stubs.queue.Dequeue, wait, timeout=PATIENCE_S)
        cluster.change(cluster.as_they_are(s2={"state": "enqueue_only"}))
        (stored,) = enqueue(cluster.stubs, org)
        # The job is neither claimed nor handed over to a waiting consumer.
        assert dequeue(cluster.stubs, org) == []
        assert found(cluster.stubs, org, stored.id).jobs[0].state == job_pb2.JOB_STATE_READY
        assert ack(cluster, org, leased) == [OK]
        look(cluster, org, stored.id)
        assert ack(cluster, near, held(cluster, near)) == [OK]
        assert not parked.done()
        cluster.change(cluster.as_they_are())
        assert [job.id for job in parked.result(PATIENCE_S).jobs] == [stored.id]


def test_a_shard_that_only_gives_takes_no_enqueues(cluster: Live) -> None:
    near, org = cluster.org_on("s1"), cluster.org_on("s2")
    (stored,) = enqueue(cluster.stubs, org)
    cluster.change(cluster.as_they_are(s2={"state": "dequeue_only"}))
    assert_forbidden(lambda: enqueue(cluster.stubs, org), "dequeue_only", "takes no enqueues")
    look(cluster, org, stored.id)
    (leased,) = dequeue(cluster.stubs, org)
    assert ack(cluster, org, leased) == [OK]
    enqueue(cluster.stubs, near)
    cluster.change(cluster.as_they_are())
    enqueue(cluster.stubs, org)


def test_a_shard_that_is_read_only_can_be_looked_at_and_does_not_change(cluster: Live) -> None:
    near, org = cluster.org_on("s1"), cluster.org_on("s2")
    leased = held(cluster, org)
    (stored,) = enqueue(cluster.stubs, org)
    cluster.change(cluster.as_they_are(s2={"state": "read_only"}))
    queue, admin = cluster.stubs.queue, cluster.stubs.admin
    assert_forbidden(lambda: enqueue(cluster.stubs, org), "read_only", "takes no enqueues")
    changes: list[Callable[[], object]] = [
        lambda: ack(cluster, org, leased),
        lambda: queue.Nack(queue_pb2.NackRequest(org=org, nacks=[queue_pb2.Nack(lease=leased.lease)])),
        lambda: queue.Extend(queue_pb2.ExtendRequest(org=org, extends=[queue_pb2.Extend(lease=leased.lease)])),
        lambda: queue.Release(queue_pb2.ReleaseRequest(org=org, leases=[leased.lease])),
        lambda: queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=[stored.id])),
        lambda: queue.AlterJobs(queue_pb2.AlterJobsRequest(org=org, ids=[stored.id], priority=1)),
        lambda: queue.RedriveJobs(queue_pb2.RedriveJobsRequest(org=org, ids=[stored.id])),
        lambda: admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue="new")),
        lambda: admin.UpdateQueue(
            admin_pb2.UpdateQueueRequest(org=org, queue=QUEUE, config=admin_pb2.QueueConfig(max_attempts=3))
        ),
        lambda: admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE)),
        lambda: admin.DeleteQueue(admin_pb2.DeleteQueueRequest(org=org, queue="home")),
        lambda: admin.PurgeQueue(admin_pb2.PurgeQueueRequest(org=org, queue=QUEUE)),
        lambda: admin.RedriveQueue(admin_pb2.RedriveQueueRequest(org=org, queue=QUEUE)),
    ]
    for change in changes:
        assert_forbidden(change, "read_only", "takes no changes")
    assert dequeue(cluster.stubs, org) == []
    look(cluster, org, stored.id)
    enqueue(cluster.stubs, near)
    cluster.change(cluster.as_they_are())
    assert ack(cluster, org, leased) == [OK]
    assert [one.id for one in dequeue(cluster.stubs, org)] == [stored.id]


def test_a_shard_that_is_off_is_not_contacted_and_is_found_again(cluster: Live, postgres: Server) -> None:
    near, org = cluster.org_on("s1"), cluster.org_on("s2")
    leased = held(cluster, org)
    wait = queue_pb2.DequeueRequest(org=org, queues=["other"], wait=Duration(seconds=60))
    with ThreadPoolExecutor(1) as threads:
        parked = threads.submit(lambda: refusal(lambda: cluster.stubs.queue.Dequeue(wait, timeout=PATIENCE_S)))
        cluster.change(cluster.as_they_are(s2={"state": "off"}))
        assert_unavailable(parked.result(PATIENCE_S))
    assert_forbidden(lambda: enqueue(cluster.stubs, org), "off", "takes no enqueues")
    assert_forbidden(lambda: ack(cluster, org, leased), "off", "takes no changes")
    for call in (
        lambda: dequeue(cluster.stubs, org),
        lambda: found(cluster.stubs, org, leased.id),
        lambda: list(cluster.stubs.cluster.CheckShard(cluster_pb2.CheckShardRequest(shard="s2"))),
    ):
        error = refusal(call)
        assert_unavailable(error)
        assert error.details() == "shard 's2' is unavailable: its state is off"
    info = cluster.info("s2")
    assert (info.state, info.reachable, info.slots) == (cluster_pb2.SHARD_STATE_OFF, False, 8192)
    until(lambda: connections_to(postgres, cluster.dsns["s2"]) == 0, "no connection is left")
    enqueue(cluster.stubs, near)
    cluster.change(cluster.as_they_are())
    until(lambda: succeeds(lambda: enqueue(cluster.stubs, org)), "it is contacted again")
    assert ack(cluster, org, leased) == [OK]


def test_a_new_cluster_deals_no_slots_to_shards_that_take_no_enqueues(
    databases: dict[str, str], tmp_path: Path, postgres: Server
) -> None:
    config = tmp_path / "cluster.toml"
    config.write_text(cluster_text({"s1": {"dsn": databases["s1"]}, "s2": {"dsn": databases["s2"], "state": "off"}}))
    with running_routers(config) as routers, stubs(routers.address) as both:
        cluster = Live(dsns=databases, routers=routers, stubs=both)
        assert [(one.name, one.slots) for one in cluster.listed().shards] == [("s1", 16_384), ("s2", 0)]
        enqueue(both, "org")
    assert connections_to(postgres, databases["s2"]) == 0


# ── Orgs on several shards ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_jobs_of_several_shards_are_listed_together_without_one_that_is_away(cluster: Live) -> None:
    org, both = cluster.org_on("s1"), cluster.stubs
    early = [new_job(delay=Duration(seconds=600)) for _ in range(3)]
    enqueue(both, org, *early)
    place(cluster, slot_of(OrgId(org)), writes="s2", reads=["s1", "s2"])
    cluster.sql("s1", "DELETE FROM windrow.owned_slot WHERE slot = %s", slot_of(OrgId(org)))
    late = [new_job(delay=Duration(seconds=60)) for _ in range(4)]
    enqueue(both, org, *late)
    ids = [job.id for job in early + late]

    def listed(page_size: int) -> tuple[list[str], set[str]]:
        token, seen, away = "", list[str](), set[str]()
        while True:
            request = admin_pb2.ListJobsRequest(
                org=org, queue=QUEUE, state=job_pb2.JOB_STATE_SCHEDULED, page_size=page_size, page_token=token
            )
            page = both.admin.ListJobs(request, timeout=PATIENCE_S)
            seen += [job.id for job in page.jobs]
            away.update(page.unavailable_shards)
            token = page.next_page_token
            if not token:
                return seen, away

    def counted() -> tuple[int, list[str]]:
        stats = both.admin.GetStats(admin_pb2.GetStatsRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
        return stats.queues[0].scheduled, list(stats.unavailable_shards)

    assert counted() == (7, [])
    for page_size in (2, 3, 100):
        seen, away = listed(page_size)
        assert (sorted(seen), away) == (sorted(ids), set())
    answer = found(both, org, *ids, unknown := str(new_job().id))
    assert ([job.id for job in answer.jobs], list(answer.not_found_ids)) == (ids, [unknown])

    cluster.change(cluster.as_they_are(s2={"state": "off"}))
    assert counted() == (3, ["s2"])
    seen, away = listed(2)
    assert (sorted(seen), away) == (sorted(job.id for job in early), {"s2"})
    answer = found(both, org, *ids, unknown)
    assert [job.id for job in answer.jobs] == [job.id for job in early]
    assert (list(answer.not_found_ids), list(answer.unavailable_shards)) == ([], ["s2"])
    # A consumer gets the jobs of the shard that is not off.
    cluster.sql("s1", "UPDATE windrow.job SET visible_at = now(), run_at = now()")
    assert {job.id for job in dequeue(both, org)} == {job.id for job in early}
    error = refusal(lambda: both.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=ids), timeout=PATIENCE_S))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
