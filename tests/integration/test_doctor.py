"""`windrow doctor` on a real Postgres with problems that the tests cause. The doctor names each problem and prints a
fix. The fix, pasted unchanged, solves the problem."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cli.main import main
from shard.postgres import partitions
from tests.conftest import CLUSTER, SHARD, connected
from tests.postgres import UNSAFE, Server

WAIT_S = 60.0
NOWHERE = "postgresql://nobody@127.0.0.1:1/none"

Findings = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ward:
    """A database with problems, and `windrow doctor`, which runs in this process."""

    file: Path
    dsn: str
    superuser_dsn: str
    capture: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    @property
    def database(self) -> str:
        return str(conninfo_to_dict(self.dsn)["dbname"])

    def windrow(self, *arguments: str) -> tuple[int, str, str]:
        self.patch.setattr(sys, "argv", ["windrow", "doctor", *arguments, "--config", str(self.file)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = self.capture.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    def examine(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Returns the exit code and the findings about the only shard, except the findings that the server of the tests
        always causes."""
        code, out, err = self.windrow("--json", *arguments)
        assert err == ""
        (document,) = map(json.loads, out.splitlines())
        always = {f"{name} is {value}" for name, value in UNSAFE.items()}
        document["findings"] = [one for one in document["findings"] if one["finding"] not in always]
        return code, document

    def findings(self, about: str, *arguments: str) -> Findings:
        return [one for one in self.examine(*arguments)[1]["findings"] if one["about"] == about]

    def make_ill(self, *statements: str) -> None:
        run(self.dsn, *statements)

    def paste(self, finding: dict[str, str], *, superuser: bool = False) -> None:
        statements = finding["fix"].split(";\n")
        run(self.superuser_dsn if superuser else self.dsn, *statements)

    def is_cured(self, about: str, *arguments: str) -> bool:
        """Waits until the doctor no longer reports a finding, because some fixes need a moment."""
        return until(lambda: not self.findings(about, *arguments))


def run(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def until(holds: Callable[[], object]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(held)


@pytest.fixture
def ward(
    postgres: Server,
    fresh_dsn: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Ward:
    monkeypatch.setenv("COLUMNS", "100")
    file = tmp_path / "cluster.toml"
    file.write_text(f'[cluster]\nname = "{CLUSTER}"\n[[shard]]\nname = "{SHARD}"\ndsn = "{fresh_dsn}"\n')
    superuser_dsn = postgres.superuser_dsn_of(str(conninfo_to_dict(fresh_dsn)["dbname"]))
    return Ward(file=file, dsn=fresh_dsn, superuser_dsn=superuser_dsn, capture=capsys, patch=monkeypatch)


def test_a_new_shard_has_nothing_to_be_warned_of(ward: Ward) -> None:
    """The test also shows that the table options and partitions that the doctor expects are those that the migrations
    make."""
    _, document = ward.examine()
    assert {one["severity"] for one in document["findings"]} <= {"notice"}
    assert {"job", "dead", "tally"} <= {table["table"] for table in document["tables"]}
    assert sum(table["partition_of"] == "finished" for table in document["tables"]) == 3
    assert [index["index"] for index in document["indexes"]] == [
        *("job_expires", "job_group_later", "job_group_slot", "job_group_waits", "job_id", "job_in_flight"),
        *("job_live_key", "job_ready", "job_set_aside"),
    ]


# ── What is held ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_session_that_is_idle_in_transaction_is_named_and_ended(ward: Ward) -> None:
    with psycopg.connect(ward.dsn, application_name="forgotten report") as forgotten:
        forgotten.isolation_level = IsolationLevel.REPEATABLE_READ
        forgotten.execute("SELECT 1")
        # The snapshot is still too young for a finding.
        assert not ward.findings("snapshot")
        code, document = ward.examine("--held-for", "0s")
        assert code == 1
        (finding,) = (one for one in document["findings"] if one["about"] == "snapshot")
        pid = forgotten.info.backend_pid
        assert finding["severity"] == "warning"
        assert finding["finding"].startswith(f"process {pid} (forgotten report, role windrow, from ")
        assert finding["finding"].endswith(", idle in transaction")
        (holder,) = document["holders"]
        assert (holder["pid"], holder["query"], holder["waits_for"]) == (pid, "SELECT 1", "Client ClientRead")
        ward.paste(finding)
        with pytest.raises(psycopg.OperationalError):
            forgotten.execute("SELECT 1")
    assert ward.is_cured("snapshot", "--held-for", "0s")


def test_a_finding_on_another_roles_session_says_what_is_hidden_and_who_may_end_it(ward: Ward) -> None:
    run(ward.superuser_dsn, "REVOKE pg_read_all_stats FROM windrow")
    with psycopg.connect(ward.superuser_dsn, application_name="nightly dump") as dump:
        dump.isolation_level = IsolationLevel.REPEATABLE_READ
        dump.execute("SELECT 1")
        (privilege,) = ward.findings("privilege")
        assert privilege["severity"] == "notice"
        (finding,) = ward.findings("snapshot", "--held-for", "0s")
        assert f"process {dump.info.backend_pid} (nightly dump, role postgres) holds a snapshot, " in finding["finding"]
        assert finding["fix"].startswith("-- as role postgres, or a superuser\n")
        ward.paste(privilege, superuser=True)
        try:
            assert not ward.findings("privilege")
            (finding,) = ward.findings("snapshot", "--held-for", "0s")
            assert "holds a snapshot for " in finding["finding"]
        finally:
            run(ward.superuser_dsn, "REVOKE pg_read_all_stats FROM windrow")


def test_what_is_done_in_another_database_keeps_nothing_here(ward: Ward, postgres: Server) -> None:
    with psycopg.connect(postgres.superuser_dsn) as elsewhere:
        elsewhere.execute("CREATE TEMP TABLE t ()")
        assert not ward.findings("snapshot", "--held-for", "0s")


def test_a_prepared_transaction_is_named_and_rolled_back(ward: Ward) -> None:
    with psycopg.connect(ward.dsn, autocommit=True) as connection:
        row = connection.execute("SHOW max_prepared_transactions").fetchone()
        if row == ("0",):
            pytest.skip("this server takes no prepared transactions")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO windrow.tally VALUES (1, 1)")
        connection.execute("PREPARE TRANSACTION 'it''s lost'")
    (finding,) = ward.findings("prepared_transaction", "--held-for", "0s")
    assert finding["finding"].startswith("prepared transaction 'it''s lost' of role windrow has been open for ")
    assert "COMMIT PREPARED 'it''s lost';" in finding["fix"]
    ward.paste(finding)
    assert not ward.findings("prepared_transaction", "--held-for", "0s")


def test_a_slot_that_nobody_uses_is_named_and_dropped(ward: Ward) -> None:
    run(ward.superuser_dsn, "SELECT pg_create_physical_replication_slot('gone', true)")
    code, document = ward.examine()
    assert code == 1
    (finding,) = (one for one in document["findings"] if one["about"] == "slot")
    assert finding["finding"].startswith("physical replication slot 'gone' is used by nobody")
    assert " of WAL" in finding["finding"]
    assert finding["fix"].startswith("-- as a superuser, or a role with REPLICATION; its reader needs a new ")
    ward.paste(finding, superuser=True)
    assert not ward.findings("slot")


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("illness", "about", "severity", "says"),
    [
        (
            "ALTER TABLE windrow.job SET (autovacuum_enabled = off)",
            "table_option",
            "critical",
            "autovacuum is off for windrow.job",
        ),
        (
            "ALTER TABLE windrow.dedup SET (autovacuum_enabled = False)",
            "table_option",
            "warning",
            "autovacuum is off for windrow.dedup",
        ),
        (
            "ALTER TABLE windrow.job SET (autovacuum_vacuum_threshold = 500000), RESET (autovacuum_vacuum_cost_delay)",
            "table_option",
            "warning",
            "autovacuum_vacuum_threshold is 500000, autovacuum_vacuum_cost_delay is not set",
        ),
    ],
)
def test_an_option_of_a_table_that_hurts_is_put_right(
    ward: Ward, illness: str, about: str, severity: str, says: str
) -> None:
    ward.make_ill(illness)
    (finding,) = ward.findings(about)
    assert finding["severity"] == severity
    assert says in finding["finding"]
    ward.paste(finding)
    assert not ward.findings(about)


def test_a_table_that_is_cleaned_sooner_than_we_ask_is_left_so(ward: Ward) -> None:
    ward.make_ill("ALTER TABLE windrow.job SET (autovacuum_vacuum_threshold = 1000)")
    assert not ward.findings("table_option")


def test_days_without_a_partition_are_given_one(ward: Ward) -> None:
    async def make_partitions() -> None:
        async with connected(ward.dsn) as database:
            await partitions.make_ahead(database)

    # The database is a copy of a database that may have been made before midnight, so a partition may be missing.
    asyncio.run(make_partitions())
    with psycopg.connect(ward.dsn) as connection:
        row = connection.execute(
            "SELECT array_agg(inhrelid::regclass::text ORDER BY 1) FROM pg_inherits i "
            "WHERE inhparent = 'windrow.finished_30'::regclass"
        ).fetchone()
    assert row is not None
    newest = [name for name in row[0] if "finished" in name][-3:]
    ward.make_ill(*(f"DROP TABLE {name}" for name in newest))
    (finding,) = ward.findings("partition")
    assert finding["severity"] == "warning"
    assert all(name.removeprefix("windrow.") in finding["finding"] for name in newest)
    ward.paste(finding)
    assert not ward.findings("partition")
    _, document = ward.examine()
    assert sum(table["partition_of"] == "finished" for table in document["tables"]) == 3


def test_a_retention_without_a_partition_is_given_one_with_its_days(ward: Ward) -> None:
    ward.make_ill(
        "INSERT INTO windrow.queue_name (queue) VALUES ('mail')",
        "INSERT INTO windrow.org (org, slot) VALUES ('acme', 7)",
        "INSERT INTO windrow.queue (name_id, org_id, org, queue, slot, retention) "
        "SELECT n.name_id, o.org_id, o.org, n.queue, 7, 14 FROM windrow.queue_name n, windrow.org o",
    )
    (finding,) = ward.findings("partition")
    assert "finished_14, finished_14_2" in finding["finding"]
    ward.paste(finding)
    assert not ward.findings("partition")


def test_a_table_with_many_rows_that_was_never_analyzed_is(ward: Ward) -> None:
    with psycopg.connect(ward.dsn, autocommit=True) as connection:
        # Otherwise autovacuum might analyze the table before the doctor examines the table.
        connection.execute("ALTER TABLE windrow.tally SET (autovacuum_enabled = off)")
        connection.execute("INSERT INTO windrow.tally SELECT 1, 1 FROM generate_series(1, 100000)")
        connection.execute("SELECT pg_stat_force_next_flush()")
    assert until(lambda: ward.findings("never_analyzed"))
    (finding,) = ward.findings("never_analyzed")
    assert "windrow.tally has 100,000 rows" in finding["finding"]
    ward.paste(finding)
    assert ward.is_cured("never_analyzed")


def test_an_index_that_was_left_unfinished_is_dropped(ward: Ward) -> None:
    ward.make_ill("CREATE INDEX job_kind ON windrow.job (kind)")
    run(ward.superuser_dsn, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'windrow.job_kind'::regclass")
    (finding,) = ward.findings("index")
    assert "windrow.job_kind is invalid" in finding["finding"]
    ward.paste(finding)
    assert not ward.findings("index")


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("whose", ["DATABASE {}", "ROLE windrow IN DATABASE {}"])
def test_settings_of_sessions_are_put_right_where_they_were_made_wrong(ward: Ward, whose: str) -> None:
    settings = {
        "synchronous_commit": "off",
        "default_transaction_isolation": "repeatable read",
        "jit": "on",
        "idle_in_transaction_session_timeout": "0",
    }
    ward.make_ill(*(f"ALTER {whose.format(ward.database)} SET {name} = '{bad}'" for name, bad in settings.items()))
    found = ward.findings("setting")
    assert [one["finding"] for one in found] == [f"{name} is {bad}" for name, bad in settings_in_order(settings, found)]
    assert len(found) == len(settings)
    for finding in found:
        ward.paste(finding)
    assert not ward.findings("setting")


def settings_in_order(settings: dict[str, str], found: Findings) -> list[tuple[str, str]]:
    names = [one["finding"].split()[0] for one in found]
    return [(name, settings[name]) for name in names]


def test_a_setting_of_the_server_is_put_right_by_a_superuser(ward: Ward) -> None:
    run(ward.superuser_dsn, "ALTER SYSTEM SET autovacuum_naptime = '5min'", "SELECT pg_reload_conf()")
    try:
        slow = "autovacuum_naptime is 5min"
        assert until(lambda: any(one["finding"] == slow for one in ward.findings("setting")))
        (finding,) = (one for one in ward.findings("setting") if one["finding"] == slow)
        assert finding["fix"].startswith("-- as a superuser\n")
        ward.paste(finding, superuser=True)
        assert until(lambda: not any("naptime" in one["finding"] for one in ward.findings("setting")))
    finally:
        run(ward.superuser_dsn, "ALTER SYSTEM RESET autovacuum_naptime", "SELECT pg_reload_conf()")


# ── Which shards, and how it ends ────────────────────────────────────────────────────────────────────────────────────


def test_a_shard_that_does_not_answer_is_reported_and_the_others_are_examined(ward: Ward) -> None:
    ward.file.write_text(ward.file.read_text() + f'[[shard]]\nname = "s2"\ndsn = "{NOWHERE}"\n')
    code, out, err = ward.windrow("--json", "--shard", "s2")
    assert code == 3
    assert err.startswith("shard 's2' is unavailable: ")
    code, out, err = ward.windrow("--json")
    first, second = map(json.loads, out.splitlines())
    assert (first["shard"], first["answered"], second["shard"], second["answered"]) == ("s1", True, "s2", False)
    assert second["error"] in err
    # Although a shard is unreachable too, the exit code is that of a critical finding.
    assert code == 1
    code, out, _ = ward.windrow()
    assert out.endswith("\n\ns2: no answer\n")


def test_a_table_that_somebody_has_locked_holds_nobody_up_for_long(ward: Ward) -> None:
    with psycopg.connect(ward.dsn) as locker:
        locker.execute("LOCK TABLE windrow.job")
        code, _, err = ward.windrow()
    assert code == 3
    assert "shard 's1' is unavailable: a session keeps a table of schema windrow locked; to find it: SELECT" in err


def test_a_shard_is_named_as_the_file_has_it_and_one_that_is_off_is_left_alone(ward: Ward) -> None:
    ward.file.write_text(ward.file.read_text() + f'[[shard]]\nname = "s2"\ndsn = "{NOWHERE}"\nstate = "off"\n')
    code, _, err = ward.windrow("--shard", "s9")
    assert (code, "names no shard 's9'; it names s1, s2" in err) == (4, True)
    code, _, err = ward.windrow("--shard", "s2")
    assert (code, "shard 's2' is off in" in err) == (5, True)
    assert ward.examine()[1]["shard"] == "s1"


def test_a_catalog_with_a_database_of_its_own_is_examined_too(ward: Ward, empty_dsn: str) -> None:
    ward.file.write_text(ward.file.read_text() + f'[catalog]\ndsn = "{empty_dsn}"\n')
    _, out, _ = ward.windrow("--json")
    assert [json.loads(line)["shard"] for line in out.splitlines()] == ["s1", "catalog"]
    code, document = ward.examine("--shard", "catalog")
    assert code == 1
    assert "there is no schema windrow in this database" in [one["finding"] for one in document["findings"]]
    assert not any(one["about"] == "partition" for one in document["findings"])


def test_a_database_of_another_shard_is_named(ward: Ward) -> None:
    ward.file.write_text(ward.file.read_text().replace(f'"{SHARD}"', '"s7"'))
    code, document = ward.examine()
    assert code == 1
    (finding,) = [one for one in document["findings"] if one["about"] == "database"]
    assert f"leads to the database of shard '{SHARD}' of cluster '{CLUSTER}'" in finding["why"]


def test_a_schema_that_this_release_cannot_use_is_named(ward: Ward) -> None:
    ward.make_ill("INSERT INTO windrow.migration VALUES (9000, 'next', '', true)")
    (finding,) = ward.findings("database")
    assert "its schema has migration 9000 of a newer release" in finding["why"]


def test_a_shard_whose_database_is_empty_is_told_to_migrate(ward: Ward, empty_dsn: str) -> None:
    ward.file.write_text(ward.file.read_text().replace(ward.dsn, empty_dsn))
    code, document = ward.examine()
    assert code == 1
    (finding,) = [one for one in document["findings"] if one["about"] == "schema"]
    assert (finding["finding"], finding["fix"]) == (
        "there is no schema windrow in this database",
        "-- windrow migrate --config FILE",
    )


def test_a_role_that_may_not_use_the_schema_is_told_what_it_lacks(ward: Ward) -> None:
    run(ward.superuser_dsn, "DROP ROLE IF EXISTS guest", "CREATE ROLE guest LOGIN PASSWORD 'guest'")
    dsn = make_conninfo(ward.dsn, user="guest", password="guest")
    ward.file.write_text(ward.file.read_text().replace(ward.dsn, dsn))
    code, out, err = ward.windrow()
    assert (code, "permission denied for schema windrow" in out + err) == (3, True)


def test_a_role_that_may_only_change_rows_is_given_the_rights_of_the_owner(ward: Ward) -> None:
    role = f"rows_{ward.database}"
    run(
        ward.superuser_dsn,
        f"DROP ROLE IF EXISTS {role}",
        f"CREATE ROLE {role} LOGIN PASSWORD 'rows'",
        f"GRANT USAGE ON SCHEMA windrow TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA windrow TO {role}",
    )
    ward.file.write_text(ward.file.read_text().replace(ward.dsn, make_conninfo(ward.dsn, user=role, password="rows")))

    def lacking() -> Findings:
        return [one for one in ward.findings("privilege") if "lacks the rights of" in one["finding"]]

    (finding,) = lacking()
    assert finding["severity"] == "critical"
    assert finding["finding"].startswith(f"role {role} lacks the rights of ")
    ward.paste(finding, superuser=True)
    assert not lacking()


def test_slots_on_a_shard_that_the_file_no_longer_names_are_reported(ward: Ward) -> None:
    ward.make_ill("UPDATE windrow.placement SET writes = '{s2}', reads = '{s2}' WHERE slot < 7")
    code, document = ward.examine()
    assert code == 1
    (finding,) = [one for one in document["findings"] if one["about"] == "catalog"]
    assert finding["finding"] == "slots live on s2, which the cluster file does not name"
    assert "put it back into the cluster file" in finding["fix"]
    with ward.file.open("a") as file:
        file.write(f'[[shard]]\nname = "s2"\ndsn = "{NOWHERE}"\n')
    _, out, _ = ward.windrow("--shard", SHARD)
    assert "slots live on" not in out


def test_a_terminal_is_never_told_what_a_session_calls_itself(ward: Ward) -> None:
    with psycopg.connect(ward.dsn, application_name="a[red]b") as evil:
        evil.isolation_level = IsolationLevel.REPEATABLE_READ
        evil.execute("SELECT '\x1b]0;owned\x07'")
        _, out, _ = ward.windrow("--held-for", "0s")
    assert "\x1b" not in out
    assert "a[red]b" in out
    assert r"\x1b]0;owned\x07" in out
