"""Tests what `windrow shards pin`, `unpin` and `pins` print for operators with a cluster file of two shards, and that
bad input changes nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cli.main import main
from shard.placement import catalog, pins
from shard.placement.slots import SLOTS, slot_of
from shard.postgres.pool import Database
from shard.vocabulary import OrgId
from tests.conftest import CLUSTER
from tests.pair import A, B

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """Runs the command in this process on one cluster."""

    file: Path
    dsn: str
    capture: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    def windrow(self, *arguments: str) -> Done:
        self.patch.setattr(sys, "argv", ["windrow", "shards", *arguments, "--config", str(self.file)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = self.capture.readouterr()
        return Done(code=int(ended.value.code or 0), out=told.out, err=told.err)

    def catalog(self, act: Callable[[Database], Awaitable[T]]) -> T:
        async def run() -> T:
            database = Database(A, self.dsn, connections=1)
            await database.open()
            try:
                return await act(database)
            finally:
                await database.close()

        return asyncio.run(run())

    def write(self, text: str) -> None:
        self.file.write_text(text)


def cluster_file(dsn: str, *, second: str = 'labels = { region = "eu" }', cluster: str = CLUSTER) -> str:
    return (
        f'[cluster]\nname = "{cluster}"\n'
        f'[[shard]]\nname = "{A}"\ndsn = "{dsn}"\nlabels = {{ region = "us" }}\n'
        f'[[shard]]\nname = "{B}"\ndsn = "postgresql://nobody@127.0.0.1:1/none"\n{second}\n'
    )


@pytest.fixture
def shell(fresh_dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("COLUMNS", "100")
    made = Shell(file=tmp_path / "cluster.toml", dsn=fresh_dsn, capture=capsys, patch=monkeypatch)
    made.write(cluster_file(fresh_dsn))
    return made


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["pin", "acme"], 2, "either --to SHARD or --label LABEL=VALUE"),
        (["pin", "acme", "--to", "s2", "--label", "region=eu"], 2, "either --to SHARD or --label LABEL=VALUE"),
        (["pin", "acme", "--label", "region"], 2, "--label 'region': write it as LABEL=VALUE, such as region=eu"),
        (["pin", "acme", "--label", "=eu"], 2, "write it as LABEL=VALUE"),
        (["pin", "", "--to", "s2"], 2, "org ''"),
        (["pin", "x" * 129, "--to", "s2"], 2, "128"),
        (["pin", "a\nb", "--to", "s2"], 2, "org 'a\\nb'"),
        (["pin", "acme", "--to", "s9"], 4, "cluster.toml: the cluster file names no shard 's9'; it has s1, s2"),
        (
            ["pin", "acme", "--label", "region=asia"],
            4,
            "no shard with the label region=asia; there is region=eu, region=us",
        ),
        (["pin", "acme", "--label", "disk=fast"], 4, "none has a label 'disk'"),
        (["unpin", "acme"], 4, "org 'acme' is not pinned"),
        (["unpin", ""], 2, "org ''"),
    ],
)
def test_bad_input_changes_nothing(shell: Shell, arguments: list[str], code: int, why: str) -> None:
    before = shell.catalog(catalog.read)
    done = shell.windrow(*arguments)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("windrow: ")
    assert why in done.err
    assert shell.catalog(catalog.read) == before
    assert shell.catalog(pins.read) == []


@pytest.mark.parametrize("state", ["draining", "read_only", "dequeue_only", "off"])
def test_an_org_is_not_pinned_to_a_shard_that_takes_none(shell: Shell, state: str) -> None:
    shell.write(cluster_file(shell.dsn, second=f'state = "{state}"\nlabels = {{ region = "eu" }}'))
    for wish in (["--to", "s2"], ["--label", "region=eu"]):
        done = shell.windrow("pin", "acme", *wish)
        assert done.code == 5
        assert f"shard 's2' is {state}, and so takes no orgs" in done.err
    assert shell.catalog(pins.read) == []


def test_an_org_is_pinned_shown_and_unpinned(shell: Shell) -> None:
    done = shell.windrow("pins")
    assert (done.code, done.out, done.err) == (0, "", "no org is pinned\n")
    done = shell.windrow("pin", "acme", "--label", "region=eu")
    assert (done.code, done.err) == (0, "")
    assert done.out == "org acme is pinned to region=eu: lives on s1; a balancer moves it to s2\n"
    assert shell.windrow("pin", "globex", "--to", "s1").out == (
        "org globex is pinned to shard s1: lives on s1, and stays there\n"
    )
    assert shell.windrow("pins").out.splitlines() == [
        "org     target     lives on    slot  state",
        "acme    region=eu  s1        16,384  waiting",
        "globex  shard s1   s1        16,385  there",
    ]
    first, second = shell.windrow("pins", "--json").documents
    assert first == {
        "org": "acme",
        "to": None,
        "label": "region=eu",
        "shards": ["s1"],
        "slot": SLOTS,
        "state": "waiting",
        "planned": "s2",
        "trouble": None,
    }
    assert (second["to"], second["label"], second["state"]) == ("s1", None, "there")
    assert shell.windrow("pin", "acme", "--label", "region=eu", "--json").documents == [first]
    done = shell.windrow("unpin", "acme")
    assert (done.code, done.out) == (0, "org acme is no longer pinned: lives on s1, and stays there\n")
    assert shell.windrow("unpin", "acme").code == 4
    assert shell.windrow("pins").out.splitlines()[1] == "acme    its hash  s1        16,384  there"


def test_an_org_that_no_shard_can_take_any_more_is_reported(shell: Shell) -> None:
    assert shell.windrow("pin", "acme", "--label", "region=eu").code == 0
    shell.write(cluster_file(shell.dsn, second='labels = { region = "us" }\nweight = 0'))
    done = shell.windrow("pins")
    assert done.code == 1
    assert done.out.splitlines()[1].split() == ["acme", "region=eu", "s1", "16,384", "stuck"]
    assert "org 'acme' stays on shard 's1': the cluster file has no shard with the label region=eu" in done.err
    (document,) = shell.windrow("pins", "--json").documents
    assert document["trouble"] in done.err
    planned = shell.windrow("plan")
    assert planned.code == 1
    assert planned.out.startswith("nothing can move now:")
    assert document["trouble"] in planned.err


def test_an_org_whose_hash_moves_is_refused_until_that_is_over(shell: Shell) -> None:
    async def begin(database: Database) -> None:
        known = await catalog.read(database)
        assert await catalog.begin_move(database, known, [slot_of(OrgId("acme"))], target=B)

    shell.catalog(begin)
    done = shell.windrow("pin", "acme", "--to", "s2")
    assert done.code == 5
    assert "moving from shard 's1' to 's2'" in done.err
    assert shell.catalog(pins.read) == []


def test_the_catalog_must_be_there_and_this_clusters(shell: Shell, empty_dsn: str) -> None:
    for text, code, why in (
        (
            cluster_file(shell.dsn, cluster="another"),
            5,
            "leads to the catalog of cluster 'tests', and this is 'another'",
        ),
        (cluster_file(empty_dsn), 3, "there is no catalog yet"),
        (cluster_file("postgresql://nobody@127.0.0.1:1/none"), 3, "the catalog is unavailable"),
        ("[[shard]]", 2, "has no name"),
    ):
        shell.write(text)
        for command in (["pins"], ["pin", "acme", "--to", "s1"], ["unpin", "acme"]):
            done = shell.windrow(*command)
            assert (done.code, done.out) == (code, "")
            assert why in done.err


def test_help_says_that_to_pin_is_how_an_org_is_moved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["windrow", "shards", "pin", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "This moves one org" in " ".join(capsys.readouterr().out.split())
