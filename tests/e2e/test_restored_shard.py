"""Runs the section of docs/operations.md about a shard that was restored from an old backup."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from shard.vocabulary import OrgId
from tests.e2e.test_cli import environ, steady, steps
from tests.e2e.test_operations import PAGE, Place
from tests.integration.test_lost_history import Backups, backups, go_back_in_time
from tests.routers import PATIENCE_S, running_routers, write_cluster

SECTION = PAGE.partition("\n## A shard was restored from an old backup\n")[2].partition("\n## ")[0]
__all__ = ["backups"]


def test_what_the_page_says_of_a_restored_shard_can_be_done_as_it_says(
    tmp_path: Path, fresh_dsn: str, backups: Backups
) -> None:
    asyncio.run(go_back_in_time(fresh_dsn, backups, OrgId("acme")))
    config = write_cluster(tmp_path / "cluster.toml", {"s1": fresh_dsn, "s2": backups.dsn})
    documented = steps(SECTION)
    assert len(documented) == 5
    with running_routers(config) as routers:
        place = Place(folder=tmp_path, environ=environ(WINDROW_ADDRESS=routers.address))
        for step in documented:
            code, out = place.run(step.command)
            assert (code, steady(out)) == (step.code, steady(step.output)), f"$ {step.command}\n{out}"
            if "windrow shards differences" in step.command:
                # This command changes nothing, so the routers still refuse the shard.
                assert place.run("windrow shards")[0] == 1
                continue
            deadline_s = time.monotonic() + PATIENCE_S
            while place.run("windrow shards")[0]:
                assert time.monotonic() < deadline_s, "the shard serves again"
