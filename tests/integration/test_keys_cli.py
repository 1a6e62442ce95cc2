"""Tests what `windrow keys` prints for operators, and that bad input changes nothing."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.access import id_of
from tests.checks import ROOT
from tests.command import Done, windrow
from tests.conftest import CLUSTER, SHARD


class Shell:
    """Runs `windrow keys` on one cluster."""

    def __init__(self, file: Path, dsn: str) -> None:
        self.file = file
        self.dsn = dsn
        file.write_text(f'[auth]\n[cluster]\nname = "{CLUSTER}"\n[[shard]]\nname = "{SHARD}"\ndsn = "{dsn}"\n')

    def keys(self, *arguments: str) -> Done:
        return windrow("keys", *arguments, "--config", str(self.file))

    def rows(self) -> list[str]:
        """Returns everything that the database stores about keys."""
        with psycopg.connect(self.dsn, autocommit=True) as catalog:
            found = catalog.execute("SELECT to_jsonb(k)::text FROM windrow.api_key k ORDER BY 1").fetchall()
            (count,) = catalog.execute("SELECT revocations::text FROM windrow.catalog").fetchall()
        return [text for (text,) in [*found, count]]


@pytest.fixture
def shell(fresh_dsn: str, tmp_path: Path) -> Shell:
    return Shell(tmp_path / "cluster.toml", fresh_dsn)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize(("output", "why"), [("> /dev/full", "No space left on device"), (">&-", "is closed")])
def test_a_key_that_could_not_be_printed_is_named_so_that_it_can_be_revoked(
    shell: Shell, output: str, why: str
) -> None:
    command = f"{sys.executable} -m cli.main keys create --org acme --config {shell.file} {output}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode == 3
    assert f"windrow: standard output{':' if 'full' in output else ''} {why}" in done.stderr
    assert "Traceback" not in done.stderr
    (revoke,) = re.findall(r"nobody has this key now: windrow (keys revoke wr_\w+) --config", done.stderr)
    assert shell.keys(*revoke.split()[1:]).code == 0


SECRET = "wr_abcdefgh2345_" + "s" * 43


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["create"], 2, "give either --org ORG or --all-orgs"),
        (["create", "--org", "acme", "--all-orgs"], 2, "give either --org ORG or --all-orgs"),
        (["create", "--org", ""], 2, "org ''"),
        (["create", "--org", "a\nb"], 2, "org 'a\\nb'"),
        (["create", "--org", "x" * 129], 2, "128"),
        (
            ["create", "--org", "acme", "--scope", "write"],
            2,
            "--scope 'write': is not one of enqueue, consume, read, admin",
        ),
        (["create", "--org", "acme", "--scope", "cluster"], 2, "needs --all-orgs"),
        (["create", "--org", "acme", "--name", "x" * 101], 2, "at most 100 printable characters"),
        (["create", "--org", "acme", "--name", "a\nb"], 2, "printable"),
        (["create", "--org", "acme", "--expires", "0"], 2, "1 s to 3,650 days"),
        (["create", "--org", "acme", "--expires", "4000d"], 2, "1 s to 3,650 days"),
        (["create", "--org", "acme", "--expires", "soon"], 2, "'soon' is not a duration"),
        (["revoke", "acme"], 2, "must be the id of a key"),
        (["revoke", SECRET], 2, "without its secret"),
        (["revoke", "wr_abcdefgh2345"], 4, "no API key has the id 'abcdefgh2345'"),
    ],
)
def test_bad_input_changes_nothing_and_shows_no_secret(shell: Shell, arguments: list[str], code: int, why: str) -> None:
    before = shell.rows()
    done = shell.keys(*arguments)
    assert (done.code, done.out) == (code, "")
    assert why in done.err
    assert "s" * 43 not in done.err
    assert shell.rows() == before


def test_a_key_is_printed_once_and_only_the_hash_of_its_secret_is_stored(shell: Shell) -> None:
    done = shell.keys("create", "--org", "acme", "--name", "web shop")
    assert done.code == 0
    (key,) = done.lines
    assert re.fullmatch(r"wr_[a-z2-7]{12}_[A-Za-z0-9_-]{43}", key)
    assert done.err == (
        f"{id_of(key)}, for org acme: enqueue, consume, read; it does not expire. The key is printed only once, to "
        "standard output:\n"
    )
    secret = key.removeprefix(f"{id_of(key)}_")
    stored, _ = shell.rows()
    assert secret not in stored
    assert hashlib.sha256(secret.encode()).hexdigest() in stored
    listed = shell.keys("list")
    assert id_of(key) in listed.out
    assert secret not in listed.out + listed.err + shell.keys("list", "--json").out


def test_keys_are_listed_with_their_state(shell: Shell) -> None:
    assert shell.keys("list").err == "there is no key\n"
    (operator,) = shell.keys("create", "--all-orgs", "--scope", "cluster", "--expires", "90d", "--json").documents
    assert (operator["org"], operator["scopes"], operator["state"]) == (None, ["cluster"], "good")
    assert operator["expires_at"] > operator["created_at"]
    (first,) = shell.keys("create", "--org", "acme", "--scope", "read", "--scope", "enqueue", "--json").documents
    assert first["scopes"] == ["enqueue", "read"]
    revoked = shell.keys("revoke", str(first["id"]))
    assert (revoked.code, revoked.out) == (0, f"{first['id']} (org acme) is revoked\n")
    listed = shell.keys("list", "--json").documents
    assert [(one["id"], one["state"]) for one in listed] == [(first["id"], "revoked"), (operator["id"], "good")]
    assert listed[0]["revoked_at"] is not None


def test_a_second_revocation_changes_nothing(shell: Shell) -> None:
    (key,) = shell.keys("create", "--org", "acme").lines
    assert shell.keys("revoke", id_of(key)).code == 0
    before = shell.rows()
    assert before[-1] == "1"
    again = shell.keys("revoke", id_of(key).removeprefix("wr_"))
    assert (again.code, f"{id_of(key)} (org acme) was revoked already, at 20" in again.out) == (0, True)
    assert shell.rows() == before


def test_a_key_of_a_cluster_that_asks_for_none_comes_with_a_warning(shell: Shell) -> None:
    shell.file.write_text(shell.file.read_text().removeprefix("[auth]\n"))
    done = shell.keys("create", "--org", "acme")
    assert (done.code, len(done.lines)) == (0, 1)
    assert done.err.startswith(f"{shell.file} has no [auth]: its routers ask nobody for a key\n")


def test_the_audit_log_has_the_org_of_a_revoked_key_and_the_name_of_a_key_that_called(shell: Shell) -> None:
    (key,) = shell.keys("create", "--org", "acme", "--name", "web shop").lines
    assert shell.keys("revoke", "wr_abcdefgh2345").code == 4
    assert shell.keys("revoke", id_of(key)).code == 0
    config = ("--config", str(shell.file))
    (create,) = windrow("audit", "--org", "acme", "--method", "create", "--json", *config).documents
    assert create["request"] == {"key": id_of(key), "scopes": "enqueue,consume,read", "name": "web shop"}
    (revoke,) = windrow("audit", "--org", "acme", "--method", "revoke", "--json", *config).documents
    assert (revoke["request"], revoke["outcome"], revoke["key_name"]) == ({"key": id_of(key)}, "OK", None)
    with psycopg.connect(shell.dsn, autocommit=True) as catalog:
        catalog.execute("UPDATE windrow.audit SET principal = %s WHERE org = 'acme'", [f"key:{id_of(key)}"])
    assert f"key:{id_of(key)} (web shop)" in windrow("audit", "--org", "acme", *config).out
    assert {one["key_name"] for one in windrow("audit", "--org", "acme", "--json", *config).documents} == {"web shop"}


def test_an_unreachable_catalog_is_told(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "cluster.toml", "postgresql://nobody@127.0.0.1:1/none")
    for arguments in (["list"], ["create", "--org", "acme"], ["revoke", "wr_abcdefgh2345"]):
        done = shell.keys(*arguments)
        assert (done.code, done.out) == (3, "")
