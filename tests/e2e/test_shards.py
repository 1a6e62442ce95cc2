"""`windrow shards plan`, `rebalance` and `drain`, and `windrow balancer`, on databases of the tests. These commands
need no router."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import psycopg
import pytest

from shard.placement.slots import SLOTS
from shard.postgres.leader_lock import leader_session
from shard.queue.store import Store
from shard.vocabulary import JobId, ShardName
from tests import preloaded, timemachine
from tests.balancers import Field, Process, balanced, open_field, until
from tests.command import Done
from tests.e2e.test_cli import WAIT_S
from tests.jobs import lease_jobs
from tests.postgres import Server

A, B = ShardName("s1"), ShardName("s2")
# The slots that s2 gets from s1. One move takes all of them.
PART = range(SLOTS - 1024, SLOTS)
BUT_A_PART = {"weight": 15}
LEFT = SLOTS - len(PART)
_numbers = itertools.count(1)


@pytest.fixture
async def field(
    tmp_path: Path, fresh_dsn: str, postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Field, None]:
    # The commands print tables of this width.
    monkeypatch.setenv("COLUMNS", "80")
    async with open_field(tmp_path, fresh_dsn, postgres, "s2") as opened:
        yield opened


def start(field: Field, *arguments: str) -> Process:
    log = field.config.parent / f"windrow-{next(_numbers)}.log"
    command = ("-m", "cli.main", *arguments, "--config", field.config)
    with log.open("w") as errors:
        return Process(process=preloaded.start(*command, stdout=subprocess.PIPE, stderr=errors), log=log)


async def end(command: Process) -> Done:
    try:
        out, _ = await asyncio.to_thread(command.process.communicate, timeout=WAIT_S)
    finally:
        command.process.kill()
    err = command.log.read_text()
    assert "Traceback" not in err
    return Done(code=command.process.returncode, out=out, err=err)


async def windrow(field: Field, *arguments: str) -> Done:
    return await end(start(field, *arguments))


async def test_a_plan_tells_what_is_to_move_and_rebalance_does_it(field: Field) -> None:
    field.write(s1={})
    await field.enqueue(20, jobs=2, among=PART)
    await field.enqueue(5, jobs=3, among=range(1000))
    field.write(s1=BUT_A_PART, s2={})
    done = await windrow(field, "shards", "plan")
    assert done.code == 1
    assert re.search(r"^s1 +s2 +1,024 +40 +planned +by weight$", done.out, flags=re.MULTILINE)
    done = await windrow(field, "shards", "rebalance")
    assert done.code == 0
    assert re.fullmatch(r"1,024 slots moved in \d+\.\ds\n", done.out)
    assert await field.slots() == {"s1": LEFT, "s2": len(PART)}
    assert (await windrow(field, "shards", "plan")).code == 0
    assert (await windrow(field, "shards", "rebalance", "--json")).documents == [
        {"slots": 0, "seconds": pytest.approx(0, abs=WAIT_S), "held": []}
    ]
    field.write(s1={}, s2={"state": "draining"})
    assert (await windrow(field, "shards", "plan", "--json")).documents == [
        {"from": "s2", "to": "s1", "slots": 1024, "jobs": 40, "state": "planned", "why": "s2 is draining"}
    ]


async def test_plan_and_rebalance_name_the_shards_that_are_left_out(field: Field) -> None:
    nothing = "nothing to move: every slot is where the cluster file wants it\n"
    for state in ("read_only", "dequeue_only", "off"):
        field.write(s1={}, s2={"state": state})
        why = f"shard 's2' keeps the slots that it has and gets no more: its state is {state}\n"
        for command in ("plan", "rebalance"):
            assert await windrow(field, "shards", command) == Done(code=0, out=nothing, err=why)
    field.dsns[B] = "host=127.0.0.1 port=1"
    field.write(s1={}, s2={"weight": 0})
    done = await windrow(field, "shards", "rebalance")
    assert (done.code, done.out) == (0, nothing)
    assert done.err.startswith("shard 's2' is unavailable: connection failed: ")
    # Now slots must move to this shard: the command names the shard, and waits for it.
    field.write(s1=BUT_A_PART, s2={})
    moving = start(field, "shards", "rebalance")
    await moving.says("nothing moves from or to shard 's2': shard 's2' is unavailable: connection failed: ")
    moving.process.send_signal(signal.SIGINT)
    assert (await end(moving)).code == 130


async def test_rebalance_shows_what_another_does_and_goes_on_where_that_ends(field: Field) -> None:
    field.write(s1=BUT_A_PART, s2={})
    async with leader_session(field.dsns[A]) as other:
        assert await other.lead()
        command = start(field, "shards", "rebalance")
        await command.says("the balancer that leads does not use this cluster file ")
        told, blocked_reason = command.log.read_text().splitlines()[:2]
        assert told.startswith("a balancer leads already: windrow balancer ")
        # The other leader has not reported any move.
        assert blocked_reason.startswith("the balancer that leads does not use this cluster file ")
        assert await field.slots() == {"s1": SLOTS}
    done = await end(command)
    assert (done.code, done.out[:18]) == (0, "1,024 slots moved ")
    assert await field.slots() == {"s1": LEFT, "s2": len(PART)}


async def test_a_rebalance_that_is_interrupted_leaves_nothing_half_done(field: Field) -> None:
    field.write(s1={})
    await field.enqueue(20, jobs=5, among=PART)
    field.write("[balancer]\njobs_per_second = 5\n", s1=BUT_A_PART, s2={})
    command = start(field, "shards", "rebalance")
    await until(lambda: field.count_jobs("s2"), bool)
    command.process.send_signal(signal.SIGINT)
    done = await end(command)
    assert (done.code, done.out) == (130, "")
    assert "stopped; a balancer or another rebalance continues" in done.err
    assert await field.databases[A].run(b"SELECT FROM windrow.departing", {}) == []
    assert (await field.slots())["moving"]


async def test_what_cannot_go_on_is_told_with_the_reason(field: Field) -> None:
    await field.admit(B)
    field.write(s1={}, s2={})
    await field.begin(A, B, range(10))
    field.write(s1={}, s2={"state": "read_only"})
    why = "the state of shard 's2' is read_only"
    done = await windrow(field, "shards", "plan")
    assert done.code == 1
    assert re.search(rf"^s1 +s2 +10 +0 +moving +does not go on: {why}$", done.out, flags=re.MULTILINE)
    done = await windrow(field, "shards", "rebalance")
    assert done.code == 1
    assert "not every slot is where the cluster file wants it\n  the move of 10 slot(s) from 's1' to 's2'" in done.err
    assert done.err.strip().endswith(why)
    done = await windrow(field, "balancer", "--once")
    assert done.code == 1
    assert "windrow: moves of 10 slots cannot go on\n" in done.err


async def test_a_plan_tells_which_databases_will_not_do(field: Field, postgres: Server, empty_dsn: str) -> None:
    encoded, foreign = "encoded_for_a_plan", "foreign_for_a_plan"
    with psycopg.connect(postgres.superuser_dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {encoded} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'".encode())
        admin.execute(f"CREATE DATABASE {foreign} TEMPLATE template0 ENCODING 'UTF8'".encode())
    others = {"s3": postgres.superuser_dsn_of(encoded), "s4": empty_dsn, "s5": empty_dsn, "s6": field.dsns[A]}
    field.dsns |= {ShardName(name): dsn for name, dsn in others.items()}
    field.dsns[ShardName("s7")] = postgres.dsn("no_such_database")
    field.dsns[ShardName("s8")] = postgres.dsn(foreign)
    try:
        field.write(s1={}, s2={}, s3={}, s4={}, s5={}, s6={}, s7={}, s8={})
        done = await windrow(field, "shards", "plan")
        upgrades = await windrow(field, "upgrade", "plan")
    finally:
        postgres.drop(encoded)
        postgres.drop(foreign)
    assert done.code == 5
    assert re.search(r"^s1 +s2 +2,048 +0 +planned +by weight$", done.out, flags=re.MULTILINE)
    noted, refused = done.err.split("windrow: 4 shards cannot be used with this cluster file\n")
    assert noted.startswith("shard 's7' is unavailable: ")
    assert noted.count("\n") == 1
    told = [line.partition(" (")[0].strip() for line in refused.splitlines()]
    assert told == [
        "shard 's3': its database's encoding is LATIN1, and Windrow needs UTF8; make it with: createdb -T template0 -E "
        "UTF8 NAME",
        "shard 's5': its DSN leads to the database of shard 's4' too",
        "shard 's6' of cluster 'tests': its DSN leads to the database of shard 's1' of cluster 'tests'",
        "shard 's8': the role in its DSN may not create the schema windrow; make it the owner of the database, or a "
        "member of the role that is",
    ]
    assert re.findall(r"^(s\d) +refused", upgrades.out, flags=re.MULTILINE) == ["s3", "s8"]


async def test_who_waits_for_a_shard_whose_database_is_refused_is_told(field: Field, empty_dsn: str) -> None:
    field.write(s1=BUT_A_PART, s2={})
    assert (await windrow(field, "balancer", "--once")).code == 0
    field.dsns[B] = empty_dsn
    field.write(s1={}, s2={"state": "draining"})
    why = "shard 's2' of cluster 'tests': its DSN leads to the database of no shard "
    async with balanced(field):
        command = start(field, "shards", "drain", "s2")
        await command.says("holds 1,024 slots")
        command.process.kill()
        command.process.communicate()
    told = command.log.read_text().splitlines()[0]
    assert told.startswith(f"nothing moves from or to shard 's2': {why}")
    assert "holds 1,024 slots" in told
    done = await windrow(field, "migrate", "--json")
    assert (done.code, [one["migrated"] for one in done.documents]) == (1, [[], []])
    assert done.documents[1]["error"].startswith(why)
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT to_regnamespace('windrow')").fetchall() == [(None,)], "it was only looked at"


async def test_a_drain_waits_until_nothing_is_left_and_tells_what_the_shard_is_needed_for(field: Field) -> None:
    field.write(s1={}, s2={"state": "draining"})
    done = await windrow(field, "shards", "drain", "s2")
    assert (done.code, done.err) == (0, "")
    assert done.out == "shard s2 holds no slots, and never did: it may be removed from the cluster file\n"
    field.write(s1=BUT_A_PART, s2={})
    assert (await windrow(field, "balancer", "--once")).code == 0
    stored = await field.enqueue(1, among=PART)
    (org,) = stored
    await lease_jobs(Store(field.databases[B]), org)
    field.write(s1={}, s2={"state": "draining"})
    command = start(field, "shards", "drain", "s2", "--json")
    told = "no balancer leads, so nothing moves: start `windrow balancer`, or `windrow shards rebalance`"
    assert await command.says(told) == told
    # If the drain takes long, lines about its progress come first.
    before = command.log.read_text().partition(told)[0].splitlines()
    assert all(line.endswith(" slots so far") for line in before)
    async with balanced(field):
        await field.until(lambda slots: slots == {"s1": SLOTS - 1, "moving": 1})
        assert command.process.poll() is None
        await timemachine.end_leases(field.databases[B], org)
        done = await end(command)
    (document,) = done.documents
    assert (done.code, document["shard"], document["slots"]) == (0, "s2", 0)
    assert document["knows_ids_until"] < document["knows_dedup_keys_until"]


async def test_a_drain_ends_when_only_orgs_are_left_that_are_pinned_to_the_shard(field: Field) -> None:
    field.write(s1={})
    field.write(s1=BUT_A_PART, s2={})
    for org in ("acme", "shop"):
        assert (await windrow(field, "shards", "pin", org, "--to", "s2")).code == 0
    assert (await windrow(field, "balancer", "--once")).code == 0
    field.write(s1={}, s2={"state": "draining"})
    assert (await windrow(field, "balancer", "--once")).code == 0
    assert await field.slots() == {"s1": SLOTS}
    done = await windrow(field, "shards", "drain", "s2")
    assert (done.code, done.out) == (1, "")
    assert "shard 's2' still holds 2 orgs that cannot move. Pin each to another shard " in done.err
    assert "or unpin it (`windrow shards unpin ORG --config " in done.err
    assert "org 'acme' stays on shard 's2': shard 's2' is draining, and so takes no orgs" in done.err
    for org in ("acme", "shop"):
        assert (await windrow(field, "shards", "unpin", org)).code == 0
    async with balanced(field):
        assert (await windrow(field, "shards", "drain", "s2")).code == 0


async def test_a_drained_shard_is_forgotten_when_it_can_know_nothing_any_more_or_by_force(field: Field) -> None:
    field.write(s1=BUT_A_PART, s2={})
    assert (await windrow(field, "balancer", "--once")).code == 0
    done = await windrow(field, "shards", "forget", "s2", "--force")
    assert (done.code, done.out) == (5, "")
    assert "shard 's2' still holds 1,024 slots: drain it first" in done.err
    ((org, jobs),) = (await field.enqueue(1, jobs=2, among=PART)).items()
    await Store(field.databases[B]).cancel(org, list(map(JobId, jobs.ids)), reason="")
    field.write(s1={}, s2={"state": "draining"})
    assert (await windrow(field, "balancer", "--once")).code == 0
    done = await windrow(field, "shards", "forget", "s2", "--force")
    assert (done.code, done.out) == (5, "")
    assert re.search(r"shard 's2' has 2 finished jobs, of \d{4}-\d\d-\d\d and before, which nobody would", done.err)
    before = await field.known()
    done = await windrow(field, "shards", "forget", "s2", "--lose-history")
    assert (done.code, done.out) == (5, "")
    assert "shard 's2' may know dedup keys until " in done.err
    assert (await field.known()).left_by(B) == before.left_by(B) is not None
    done = await windrow(field, "shards", "forget", "s2", "--force", "--lose-history", "--json")
    assert (done.code, done.documents) == (0, [{"shard": "s2", "slots": 1024}])
    assert (await field.known()).left_by(B) is None
    assert (await field.known()).epoch == before.epoch + 1
    done = await windrow(field, "shards", "forget", "s2")
    assert (done.code, done.out) == (0, "shard s2 is not used: it may be removed from the cluster file\n")


async def test_a_plan_refuses_a_file_without_a_shard_that_is_still_needed(field: Field) -> None:
    field.write(s1=BUT_A_PART, s2={})
    assert (await windrow(field, "balancer", "--once")).code == 0
    field.write(s1={})
    done = await windrow(field, "shards", "plan")
    assert done.code == 5
    assert "the catalog places slots on shard(s) s2, which the cluster file does not name: put them back" in done.err
    field.write(s1={}, s2={"state": "draining"})
    assert (await windrow(field, "balancer", "--once")).code == 0
    field.write(s1={})
    done = await windrow(field, "shards", "plan")
    assert done.code == 5
    assert "shard 's2': routers refuse a file without it, because they still ask it about retried" in done.err
    field.write(s1={}, s2={"state": "draining"})
    assert (await windrow(field, "shards", "forget", "s2", "--force")).code == 0
    field.write(s1={})
    assert (await windrow(field, "shards", "plan")).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("shards", "drain", "s9"), 4, "names no shard 's9'; it names s1, s2"),
        (("shards", "forget", "s9"), 4, "there is no shard 's9'; the cluster file names s1, s2"),
        (("shards", "drain", "s2"), 2, 'to drain it, write into its [[shard]]\n  state = "draining"'),
        (
            ("shards", "--json", "plan"),
            2,
            "an option before 'plan' is for the list of shards: put it after the command",
        ),
    ],
)
async def test_an_error_message_says_what_is_wrong(
    field: Field, arguments: tuple[str, ...], code: int, words: str
) -> None:
    field.write(s1={}, s2={})
    done = await windrow(field, *arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err


async def test_an_error_message_says_why_the_catalog_cannot_be_used(field: Field) -> None:
    field.write('[catalog]\ndsn = "host=127.0.0.1 port=1"\n', s1={}, s2={})
    for command in (("shards", "plan"), ("shards", "rebalance"), ("balancer", "--once")):
        done = await windrow(field, *command)
        assert (done.code, done.out) == (3, "")
        first, where = done.err.splitlines()
        assert first.startswith("windrow: the catalog is unavailable: connection failed: ")
        assert where == "  it is in the database of the file's first [[shard]], or of its [catalog]"
    field.dsns[A] = field.dsns[B]
    field.write(s1={}, s2={})
    done = await windrow(field, "shards", "plan")
    assert (done.code, done.err) == (
        3,
        "windrow: the catalog is unavailable: there is no catalog yet; the first router makes it\n"
        "  it is in the database of the file's first [[shard]], or of its [catalog]\n",
    )
    field.write("[balancer]\njobs_per_second = 0\n", s1={}, s2={})
    done = await windrow(field, "balancer")
    assert done.code == 2
    assert "[balancer] jobs_per_second: must be a whole number from 1 to 1000000, not 0" in done.err
