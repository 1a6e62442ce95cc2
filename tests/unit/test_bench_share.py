"""A fixed share of the CPU for processes of the benchmark."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.share import fixed_share
from bench.system import Wrong


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process.pid


def group_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_processes_are_in_a_group_with_their_share_and_back_in_their_own_afterwards(child: int) -> None:
    before = group_of(child)
    try:
        with fixed_share([child], cores=0.25):
            (line,) = (line for line in group_of(child).splitlines() if "windrow-bench" in line)
            name = line.rpartition("/")[2]
            (group,) = (found.parent for found in Path("/sys/fs/cgroup").glob(f"**/{name}/cgroup.procs"))
            settings = [group / "cpu.max", group / "cpu.cfs_quota_us"]
            (share,) = (file.read_text().split()[0] for file in settings if file.exists())
            assert share == "2500"
    except Wrong as error:
        pytest.skip(str(error))
    assert group_of(child) == before
    assert not group.exists()
