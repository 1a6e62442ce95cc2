"""A shard whose server has a full disk answers but cannot write. In these tests, a function and a trigger raise the
error that Postgres raises on a full disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.integration.test_router import Running, assert_unavailable, dequeue, enqueue, refusal, succeeds
from tests.postgres import Server
from tests.routers import running_routers, stubs, until, write_cluster

FULL = 'could not extend file "base/16384/16412": No space left on device'
_RAISE = f"RAISE EXCEPTION USING ERRCODE = 'disk_full', MESSAGE = '{FULL}', HINT = 'Check free disk space.'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    dsn: str

    @property
    def address(self) -> str:
        parts = conninfo_to_dict(self.dsn)
        return f"database {parts['dbname']!r} at {parts['host']}:{parts['port']}"

    @property
    def told(self) -> str:
        return (
            f"shard 's2' is unavailable: the disk of the {self.address} is full: {FULL}; "
            "make room there, and the shard takes writes again"
        )

    def fill(self) -> None:
        self._run(
            "CREATE FUNCTION full_disk.array_fill(text, integer[]) RETURNS text[] LANGUAGE plpgsql AS "
            f"$$ BEGIN {_RAISE}; END $$",
            f"CREATE FUNCTION full_disk.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {_RAISE}; END $$",
            "CREATE TRIGGER full_disk BEFORE INSERT ON windrow.job EXECUTE FUNCTION full_disk.refuse()",
        )

    def empty(self) -> None:
        self._run("DROP TRIGGER full_disk ON windrow.job", "DROP FUNCTION full_disk.array_fill(text, integer[])")

    def _run(self, *statements: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


@pytest.fixture
def disk(postgres: Server) -> Generator[Disk, None, None]:
    """The disk of shard s2. Functions of the schema full_disk shadow those of Postgres."""
    made = Disk(dsn=postgres.create("full_s2"))
    made._run("CREATE SCHEMA full_disk", "ALTER DATABASE full_s2 SET search_path = full_disk, pg_catalog, public")
    yield made
    postgres.drop("full_s2")


@pytest.fixture
def running(postgres: Server, disk: Disk, tmp_path: Path) -> Generator[Running, None, None]:
    dsns = {"s1": postgres.create("full_s1"), "s2": disk.dsn}
    config = write_cluster(tmp_path / "cluster.toml", dsns)
    with running_routers(config) as routers, stubs(routers.address) as both:
        yield Running(dsns=dsns, routers=routers, stubs=both)
    postgres.drop("full_s1")


Windrow = Callable[..., tuple[int, str]]


@pytest.fixture
def windrow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Windrow:
    """Returns a function that runs the command in this process, and returns the exit code and the output."""
    import sys

    from cli.main import main

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["windrow", *arguments])
        monkeypatch.setenv("COLUMNS", "300")
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def test_a_shard_with_a_full_disk_is_told_as_such_to_callers_and_by_windrow_shards(
    running: Running, disk: Disk, windrow: Windrow
) -> None:
    near, far, both = running.org_on("s1"), running.org_on("s2"), running.stubs
    shards = ("shards", "--address", running.routers.address)
    # Fill the disk before the statements run. Otherwise a connection would have plans of these statements already, and
    # these plans use the original functions.
    disk.fill()
    error = refusal(lambda: enqueue(both, far))
    assert_unavailable(error)
    assert error.details() == disk.told
    # Calls that write nothing succeed, and so do calls to other shards.
    assert dequeue(both, far) == []
    enqueue(both, near)
    code, out = windrow(*shards)
    assert (code, "disk full" in out, disk.told in out) == (1, True, True)
    code, out = windrow(*shards, "--json")
    told = {one["shard"]: one for one in map(json.loads, out.splitlines())}
    assert (code, told["s2"]["reachable"], told["s2"]["disk_full"], told["s2"]["error"]) == (1, True, True, disk.told)
    assert (told["s1"]["disk_full"], told["s1"]["error"]) == (False, None)
    disk.empty()
    until(lambda: succeeds(lambda: enqueue(both, far)), "it takes jobs again")
    assert windrow(*shards)[0] == 0


def test_doctor_names_a_full_disk_and_what_to_do(running: Running, disk: Disk, windrow: Windrow) -> None:
    running.org_on("s2")
    doctor = ("doctor", "--config", str(running.routers.config), "--shard", "s2", "--json")

    def findings() -> list[dict[str, str]]:
        return [one for one in json.loads(windrow(*doctor)[1])["findings"] if one["about"] == "disk"]

    assert findings() == []
    disk.fill()
    (found,) = findings()
    assert (found["severity"], found["finding"]) == ("critical", f"the disk is full: {FULL}")
    assert "enlarge the disk" in found["fix"]
    disk.empty()
    assert findings() == []
