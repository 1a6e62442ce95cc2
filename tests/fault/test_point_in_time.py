"""One shard is recovered to a point in time with the commands of docs/operations.md: a base backup and archived WAL.
After that point, jobs ran, slots moved and schedules fired. Every difference is listed, and no job runs on two
shards."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration

from embedded import BinariesNotFound, find_binaries
from embedded.account import server_account
from tests.command import Done, windrow
from tests.e2e.test_failover_by_hand import BLOCK, PASSWORD, Machine, begin, machine, search_path
from tests.e2e.test_operations import PAGE
from tests.jobs import job_id, job_message
from tests.routers import PATIENCE_S, Stubs, running_routers, stubs, until, write_cluster
from windrow.v1 import admin_pb2, job_pb2, queue_pb2, schedules_pb2, workflows_pb2

SECTION = PAGE.partition("\n## Recover one shard to a point in time\n")[2].partition("\n## ")[0]
# One org stays on the restored shard, one leaves it after the point, and one comes to it after the point.
STAYS, LEAVES, COMES = "stays", "leaves", "comes"
WORK, TICKS, HELD, FLOW, KEYED = "work", "ticks", "held", "flow", "keyed"
EVERY_S = 2
EARLIER = ("CreateSchedule", "CreateQueue", "QuarantineKind", "StartWorkflow")


@dataclass(kw_only=True)
class Clients:
    """Producers and consumers, and what they saw."""

    router: Stubs
    stored: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    acked: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    # The jobs of each org's workflow.
    flows: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    # The instant of the schedule, for each job that a schedule stored.
    ticks: dict[str, int] = field(default_factory=dict)

    def enqueue(self, org: str, ids: list[str]) -> int:
        """Enqueues jobs with these ids. Returns how many of them were known already."""
        jobs = [job_message(id=one, queue=WORK, kind="work") for one in ids]
        results = self.router.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs), timeout=PATIENCE_S).results
        assert [result.id for result in results] == ids
        self.stored[org] += ids
        return sum(result.duplicate for result in results)

    def enqueue_new(self, org: str, number: int) -> list[str]:
        ids = [str(job_id()) for _ in range(number)]
        assert self.enqueue(org, ids) == 0
        return ids

    def start_workflow(self, org: str) -> str:
        """Starts a workflow of two nodes. The second node waits for the first. Returns the id of the workflow."""
        first, second = [
            workflows_pb2.NewNode(name=name, job=job_message(queue=FLOW, kind="node")) for name in ("a", "b")
        ]
        second.after.add(node="a")
        request = workflows_pb2.StartWorkflowRequest(org=org, id=str(job_id()), nodes=[first, second])
        self.flows[org] = list(self.router.workflows.StartWorkflow(request, timeout=PATIENCE_S).job_ids)
        return request.id

    def lease(self, org: str, number: int, *, queue: str = WORK, wait_s: int = 0) -> list[job_pb2.LeasedJob]:
        request = queue_pb2.DequeueRequest(
            org=org,
            queues=[queue],
            max_jobs=number,
            visibility_window=Duration(seconds=3600),
            wait=Duration(seconds=wait_s),
        )
        return list(self.router.queue.Dequeue(request, timeout=PATIENCE_S).jobs)

    def ack(self, org: str, jobs: list[job_pb2.LeasedJob]) -> list[str]:
        if jobs:
            acks = [queue_pb2.Ack(lease=job.lease) for job in jobs]
            answers = self.router.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks), timeout=PATIENCE_S).answers
            assert set(answers) == {job_pb2.JOB_ANSWER_OK}
        self.acked[org] += [job.id for job in jobs]
        return [job.id for job in jobs]

    def work(self, org: str, number: int) -> list[str]:
        return self.ack(org, self.lease(org, number))

    def drain(self, org: str, queue: str = WORK, *, at_least: int = 0) -> list[job_pb2.LeasedJob]:
        """Runs all jobs that are ready, and waits until at least `at_least` jobs have run. The wait is needed: if a job
        was due earlier than jobs that the router has seen, only a sweep finds it."""
        ran: list[job_pb2.LeasedJob] = []
        while jobs := self.lease(org, 100, queue=queue, wait_s=20 if len(ran) < at_least else 0):
            self.ack(org, jobs)
            ran += jobs
        return ran

    def tick(self) -> list[job_pb2.LeasedJob]:
        """Waits for a job of the schedule, and runs all ready jobs of the schedule."""
        jobs = self.lease(STAYS, 100, queue=TICKS, wait_s=20)
        self.ack(STAYS, jobs)
        self.ticks |= {job.id: job.scheduled_run.at.ToMicroseconds() for job in jobs}
        return jobs


@dataclass(kw_only=True)
class Place:
    s2: Machine
    clients: Clients
    config: Path
    address: str

    def windrow(self, *arguments: str) -> Done:
        done = windrow(*arguments, "--config", str(self.config))
        assert done.code == 0, done
        return done

    def move(self, org: str, shard: str) -> None:
        self.windrow("shards", "pin", org, "--to", shard)
        self.windrow("shards", "rebalance")

    def set_state(self, state: str) -> None:
        """Sets the state of s2 in the cluster file, and waits until the router knows the new state."""
        first, middle, last = self.config.read_text().partition("name = 's2'\n")
        last = re.sub(r"state = .*\n", "", last)
        self.config.write_text(f"{first}{middle}state = '{state}'\n{last}")

        def is_known() -> bool:
            shards = windrow("shards", "--json", "--address", self.address).documents
            return any(one["shard"] == "s2" and one["state"] == state for one in shards)

        until(is_known, f"s2 is {state}")

    def shards_are_up(self) -> bool:
        return windrow("shards", "--address", self.address).code == 0

    def do(self, block: str) -> None:
        where, _, script = block.partition("\n")
        if where == "# on s2":
            self.s2.do(script)
        else:
            code, out = self.s2.place.run(script)
            assert code == 0, out


@contextlib.contextmanager
def opened(folder: Path, catalog_dsn: str) -> Generator[Place]:
    account = server_account()
    try:
        programs = find_binaries().folder
    except BinariesNotFound as error:
        pytest.skip(str(error))
    with machine("s2", search_path(folder, programs, account), account) as s2:
        begin(s2, programs / "initdb", account)
        environ = s2.place.environ
        environ.update(S2=s2.dsn, ARCHIVE=str(s2.place.folder / "archive"), BACKUP=str(s2.place.folder / "backup"))
        dsn = f"host=127.0.0.1 port={s2.port} user=windrow password={PASSWORD} dbname=windrow"
        config = write_cluster(folder / "cluster.toml", {"s1": catalog_dsn, "s2": dsn})
        config.write_text(config.read_text() + "\n[audit]\ndays = 1\n")
        # The commands of the page run in the folder of the second shard's machine.
        (s2.place.folder / "cluster.toml").symlink_to(config)
        with running_routers(config) as routers, stubs(routers.address) as router:
            yield Place(s2=s2, clients=Clients(router=router), config=config, address=routers.address)


def clock(place: Place) -> tuple[str, int]:
    with psycopg.connect(place.s2.dsn, autocommit=True) as connection:
        row = connection.execute("SELECT t::text, (extract(epoch FROM t) * 1000000)::bigint FROM clock_timestamp() t")
        text, micros = row.fetchone() or ("", 0)
    return text, micros


def enqueue_one(router: Stubs, job: job_pb2.NewJob) -> queue_pb2.EnqueueResult:
    (result,) = router.queue.Enqueue(queue_pb2.EnqueueRequest(org=COMES, jobs=[job]), timeout=PATIENCE_S).results
    return result


def archived(place: Place) -> tuple[int, int]:
    """Returns how many files of WAL were archived, and how many failures there were."""
    with psycopg.connect(place.s2.dsn, autocommit=True) as connection:
        row = connection.execute("SELECT archived_count, failed_count FROM pg_stat_archiver").fetchone()
    assert row is not None
    return row[0], row[1]


def create_schedule(router: Stubs) -> None:
    spec = schedules_pb2.ScheduleSpec(
        interval=Duration(seconds=EVERY_S),
        overlap=schedules_pb2.OVERLAP_POLICY_ALLOW,
        catch_up=schedules_pb2.CATCH_UP_POLICY_ALL,
    )
    job = job_pb2.JobTemplate(queue=TICKS, kind="tick")
    request = schedules_pb2.CreateScheduleRequest(org=STAYS, name="ticks", spec=spec, job=job)
    router.schedules.CreateSchedule(request, timeout=PATIENCE_S)


@pytest.mark.timeout(400)
def test_a_shard_goes_back_in_time_and_every_difference_is_listed_and_no_job_has_two_owners(
    tmp_path: Path, fresh_dsn: str
) -> None:
    backup, restore, differences, accept, reset = [text for kind, text in BLOCK.findall(SECTION) if kind == "sh"]
    with opened(tmp_path, fresh_dsn) as place:
        clients = place.clients
        for org, shard in ((STAYS, "s2"), (LEAVES, "s2"), (COMES, "s1")):
            place.windrow("shards", "pin", org, "--to", shard)
        place.windrow("shards", "rebalance")
        place.do(backup)
        until(place.shards_are_up, "the shard is back with its archive")
        until(lambda: archived(place) != (0, 0), "the WAL is archived")
        assert archived(place)[1] == 0

        # These changes come before the point of recovery.
        create_schedule(clients.router)
        config = admin_pb2.QueueConfig(
            max_attempts=3, retry=job_pb2.RetryPolicy(fixed=job_pb2.FixedRetry(delay=Duration(seconds=9)))
        )
        request = admin_pb2.CreateQueueRequest(org=STAYS, queue=HELD, config=config)
        clients.router.admin.CreateQueue(request, timeout=PATIENCE_S)
        quarantine = admin_pb2.QuarantineKindRequest(org=STAYS, queue=HELD, kind="bad", reason="it crashes")
        clients.router.admin.QuarantineKind(quarantine, timeout=PATIENCE_S)
        workflow, _ = [clients.start_workflow(org) for org in (STAYS, LEAVES)]
        for org in (STAYS, LEAVES, COMES):
            clients.enqueue_new(org, 60)
            clients.work(org, 20)
        leased = clients.lease(STAYS, 5)
        keyed = job_message(id=str(job_id()), queue=KEYED, kind="work", dedup_key="once")
        assert not enqueue_one(clients.router, keyed).duplicate
        while not clients.ticks:
            clients.tick()
        before = {org: set(ids) for org, ids in clients.stored.items()}
        acked = {org: set(ids) for org, ids in clients.acked.items()}
        point, point_us = clock(place)

        # These changes come after the point: jobs run, one slot leaves, another slot comes, a queue is changed, and a
        # schedule fires.
        clients.ack(STAYS, leased)
        clients.work(STAYS, 10)
        clients.enqueue_new(STAYS, 30)
        place.move(LEAVES, "s1")
        place.move(COMES, "s2")
        for org in (LEAVES, COMES):
            clients.enqueue_new(org, 15)
            clients.work(org, 25)
        for org in (STAYS, LEAVES):
            assert [job.id for job in clients.drain(org, FLOW)] == clients.flows[org]
        clients.router.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=STAYS, queue=HELD), timeout=PATIENCE_S)
        while sum(at > point_us for at in clients.ticks.values()) < 3:
            clients.tick()

        place.s2.place.environ["POINT"] = point
        place.do(restore)
        listed = windrow("shards", "--address", place.address)
        until(
            lambda: "has lost history" in " ".join(windrow("shards", "--address", place.address).out.split()),
            f"routers refuse it: {listed}",
        )
        place.do(differences)
        found = read_differences(place)
        print(shown := place.windrow("shards", "differences", "s2").out)
        words = [line.split() for line in shown.splitlines()]

        # The list says what becomes of each job, which org has come to the shard, and what callers may have changed
        # since the point.
        live = {org: before[org] - acked[org] for org in before}
        by_fate = defaultdict[tuple[str, str, str | None], set[str]](set)
        for job in found["job"]:
            if job["queue"] != TICKS:
                by_fate[job["org"], job["fate"], job["known_on"]].add(job["id"])
        assert by_fate == {
            (STAYS, "may_run_again", None): live[STAYS] | set(clients.flows[STAYS]),
            (LEAVES, "deleted", "s1"): live[LEAVES] | set(clients.flows[LEAVES]),
        }
        assert [(one["org"], one["came_from"]) for one in found["org_came"]] == [(COMES, "s1")]
        # Changes of the minute before the point may be listed too.
        changed = [one["method"].rpartition("/")[2] for one in found["change"]]
        assert [method for method in changed if method not in EARLIER] == ["PauseQueue"]
        assert found["workflow"] == [{"org": STAYS, "id": workflow, "name": ""}]
        assert found["quarantine"] == [{"org": STAYS, "queue": HELD, "kind": "bad"}]
        retry = {"fixed": {"delay_us": 9_000_000}}
        assert found["queue"] == [{"org": STAYS, "queue": HELD, "max_attempts": 3, "retry": retry}]
        (schedule,) = found["schedule"]
        ran_since = {at for at in clients.ticks.values() if at > point_us}
        assert all(micros(schedule["skipped"]) <= at <= micros(schedule["skipped_through"]) for at in ran_since)

        for line in ([STAYS, WORK, "leased", "5"], [LEAVES, WORK, "ready", "deleted", "s1", "40"], [COMES, "s1"]):
            assert line in words

        # The loss is accepted. The shard gives no jobs until operators have looked at the jobs.
        place.set_state("enqueue_only")
        place.do(accept)
        until(place.shards_are_up, "the shard serves again")
        runs = clients.router.schedules.GetSchedule(
            schedules_pb2.GetScheduleRequest(org=STAYS, name="ticks"), timeout=PATIENCE_S
        ).runs
        (told,) = [run for run in runs if run.skip_reason == schedules_pb2.SKIP_REASON_RECOVERED]
        skipped = range(told.at.ToMicroseconds(), told.through.ToMicroseconds() + 1)
        assert all(at in skipped for at in ran_since)
        assert clients.lease(STAYS, 1) == []
        # Consumers know which jobs they have acked.
        ended = sorted(live[STAYS] & set(clients.acked[STAYS]))
        assert len(ended) == 15
        done = windrow("jobs", "cancel", STAYS, *ended, "--address", place.address)
        assert done.code == 0, done
        place.set_state("active")
        # A standby that is made from this server must not stop at the point.
        place.do(reset)
        assert "recovery_target" not in (place.s2.place.folder / "backup.new/postgresql.auto.conf").read_text()

        # All remaining jobs run, and no job runs a second time.
        ticks = {job["id"] for job in found["job"] if job["queue"] == TICKS}
        for tick in clients.tick():
            assert tick.id in ticks or tick.scheduled_run.at.ToMicroseconds() not in skipped
        left = live[STAYS] - set(ended)
        assert {job.id for job in clients.drain(STAYS, at_least=len(left))} == left
        clients.drain(LEAVES)
        assert not clients.drain(COMES)
        # A workflow continues where it was, on one shard only.
        assert [job.id for job in clients.drain(STAYS, FLOW, at_least=1)] == clients.flows[STAYS]
        assert clients.drain(LEAVES, FLOW) == []
        ran: dict[str, Counter[str]] = {org: Counter(ids) for org, ids in clients.acked.items()}
        for org in (STAYS, LEAVES, COMES):
            assert {ran[org][job] for job in clients.stored[org]} <= {0, 1}
        assert ran[LEAVES].keys() == {*clients.stored[LEAVES], *clients.flows[LEAVES]}, (
            "nothing is lost of an org that left"
        )

        # Producers repeat all jobs that they know. Jobs that the shard still has are recognised, and the others are
        # stored.
        for org in (STAYS, COMES):
            sent, there = list(clients.stored[org]), before[org] - (live[org] if org == COMES else set())
            assert clients.enqueue(org, sent) == len(there)
            assert {job.id for job in clients.drain(org)} == set(sent) - there
        # The shard that the org left has the dedup key of a lost job. So this job is answered as a duplicate until the
        # producer sends it without the key.
        assert enqueue_one(clients.router, keyed).duplicate
        assert clients.lease(COMES, 1, queue=KEYED) == []
        keyed.ClearField("dedup")
        assert not enqueue_one(clients.router, keyed).duplicate
        assert [job.id for job in clients.drain(COMES, KEYED)] == [keyed.id]
        done = windrow("check", "--address", place.address)
        assert done.code == 0, done


def read_differences(place: Place) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    loss, *rest = map(json.loads, (place.s2.place.folder / "differences.jsonl").read_text().splitlines())
    assert (loss["lost_history"], loss["slots_come"], loss["slots_left"]) == (True, 1, 1)
    for one in rest:
        found[one.pop("difference")].append(one)
    return found


def micros(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000_000)
