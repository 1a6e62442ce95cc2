"""Runs docs/operations.md on a router, a balancer and two shards, and checks that the README shows the same commands.
The page's sections on failover and on a restored shard are run by test_failover_by_hand.py and
test_restored_shard.py."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from embedded import find_binaries, open_clusters
from tests.balancers import balancer_process
from tests.e2e.test_cli import environ, steady, steps
from tests.routers import running_routers

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 180.0
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = (ROOT / "docs/operations.md").read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    folder: Path
    environ: dict[str, str]

    def run(self, script: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-euc", script],
            env=self.environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=RUN_S,
        )
        return done.returncode, done.stdout.strip("\n")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    config = tmp_path / "cluster.toml"
    with open_clusters(["s1", "s2", "s3"], ephemeral=True) as shards:
        two = "".join(f'[[shard]]\nname = "{name}"\ndsn = "{shards.dsns[name]}"\n\n' for name in ("s1", "s2"))
        config.write_text(two)
        with psycopg.connect(shards["s3"].superuser_dsn, autocommit=True) as db3:
            # The page creates the database and the role.
            db3.execute("DROP DATABASE windrow")
            db3.execute("DROP ROLE windrow")
        programs = f"{find_binaries().folder}{os.pathsep}{environ()['PATH']}"
        with running_routers(config) as routers, balancer_process(config) as balancer:
            reader = environ(
                WINDROW_ADDRESS=routers.address,
                DB3=shards["s3"].superuser_dsn,
                S1=make_conninfo(shards["s1"].superuser_dsn, dbname="windrow"),
                PATH=programs,
            )
            yield Place(folder=tmp_path, environ=reader)
            assert "Traceback" not in balancer.log.read_text()


@pytest.mark.timeout(300)
def test_what_the_page_says_can_be_done_as_it_says(place: Place) -> None:
    blocks = BLOCK.findall(PAGE.partition("\n## A shard was restored from an old backup\n")[0])
    assert len(blocks) >= 9
    db3 = conninfo_to_dict(place.environ["DB3"])
    log = place.folder / "cluster.log"
    for kind, text in blocks:
        if kind == "sh":
            code, out = place.run(_on_this_machine(text, db3))
            assert code == 0, f"{text}\n{out}\nThe routers' log:\n{log.read_text()}"
            continue
        for step in steps(f"```console\n{text}```\n"):
            code, out = place.run(step.command)
            assert (code, steady(out)) == (step.code, steady(step.output)), (
                f"$ {step.command}\n{out}\nThe routers' log:\n{log.read_text()}"
            )


def _on_this_machine(text: str, db3: Mapping[str, object]) -> str:
    """Replaces the page's server of s3 by one of the test's servers, which is on loopback and without TLS."""
    return text.replace("@db3/", f"@{db3['host']}:{db3['port']}/").replace("?sslmode=verify-full", "")


def test_the_readme_shows_no_other_commands_for_it() -> None:
    readme = (ROOT / "README.md").read_text()
    section = re.search(r"^## A cluster that grows\n(.*?)^## ", readme, re.DOTALL | re.MULTILINE)
    assert section is not None
    shown = re.findall(r"^\./run (windrow shards .*?)(?: +#.*)?$", section[1], re.MULTILINE)
    assert len(shown) >= 3
    for command in shown:
        assert command in PAGE
