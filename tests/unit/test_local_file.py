"""Which Postgres servers `windrow up` starts, and that it keeps operators' changes of the cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import local_file
from cli.exits import CommandFailed
from shard.placement.cluster_file import read_cluster

DB2 = "postgresql://windrow:x@db2/windrow?sslmode=require"
ELSEWHERE = f'\n[[shard]]\nname = "s2"\ndsn = "{DB2}"\nweight = 3 # a large machine\n'


def dsn(name: str, port: int = 20_000) -> str:
    return f"postgresql://windrow:of-{name}@127.0.0.1:{port}/windrow"


def have_data(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "owner.lock").touch()


def write(root: Path, text: str = "", *names: str) -> Path:
    path = root / "s1" / "cluster.toml"
    local_file.keep(path, {name: dsn(name) for name in names})
    path.write_text(path.read_text() + text)
    return path


def test_without_data_there_are_two_shards_or_as_many_as_are_wanted(tmp_path: Path) -> None:
    assert local_file.servers(None, None) == local_file.servers(tmp_path, None) == ["s1", "s2"]
    assert local_file.servers(tmp_path, 3) == ["s1", "s2", "s3"]


def test_data_whose_first_start_was_cut_off_has_no_file_and_is_gone_on_with(tmp_path: Path) -> None:
    have_data(tmp_path, "s10", "s1", "s2", "other")
    assert local_file.servers(tmp_path, None) == ["s1", "s2", "s10"]


def test_a_shard_that_is_elsewhere_keeps_its_name_and_is_not_started_here(tmp_path: Path) -> None:
    have_data(tmp_path, "s1")
    write(tmp_path, ELSEWHERE, "s1")
    assert local_file.servers(tmp_path, None) == ["s1"]
    assert local_file.servers(tmp_path, 2) == ["s1", "s3"]


def test_a_shard_that_was_taken_out_of_the_file_is_started_again_only_where_it_is_wanted(tmp_path: Path) -> None:
    have_data(tmp_path, "s1", "s2")
    write(tmp_path, "", "s1")
    assert local_file.servers(tmp_path, None) == ["s1"]
    assert local_file.servers(tmp_path, 2) == ["s1", "s2"]


def test_fewer_shards_than_there_are_and_a_file_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    have_data(tmp_path, "s1", "s2")
    path = write(tmp_path, "", "s1", "s2")
    with pytest.raises(CommandFailed, match="has 2 shards, more than 1"):
        local_file.servers(tmp_path, 1)
    path.write_text(path.read_text() + "[routr]\n")
    with pytest.raises(CommandFailed, match=f"{path}: unknown key 'routr'"):
        local_file.servers(tmp_path, None)


def test_what_operators_wrote_stays_and_servers_are_added_and_found_again(tmp_path: Path) -> None:
    have_data(tmp_path, "s1")
    path = write(tmp_path, f'state = "dequeue_only"\n{ELSEWHERE}\n[balancer]\njobs_per_second = 7\n', "s1")
    path.chmod(0o644)
    before = path.read_text()
    local_file.keep(path, {"s1": dsn("s1")})
    assert path.read_text() == before
    assert path.stat().st_mode & 0o777 == 0o600
    local_file.keep(path, {"s1": dsn("s1", 20_001), "s3": dsn("s3")})
    added = f'\n[[shard]]\nname = "s3"\ndsn = "{dsn("s3")}"\n'
    assert path.read_text() == before.replace(dsn("s1"), dsn("s1", 20_001)) + added
    assert [entry.name for entry in read_cluster(path).shards] == ["s1", "s2", "s3"]


def test_a_dsn_that_operators_wrote_stays_too(tmp_path: Path) -> None:
    have_data(tmp_path, "s1")
    path = write(tmp_path, "", "s1")
    path.write_text(path.read_text().replace(dsn("s1"), "host=127.0.0.1 dbname=windrow"))
    before = path.read_text()
    local_file.keep(path, {"s1": dsn("s1")})
    assert path.read_text() == before
