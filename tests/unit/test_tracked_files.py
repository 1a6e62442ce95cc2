"""What git tracks is text, except for a few files that are named here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BINARY = {
    "docs/pictures/dashboard-cluster.png",
    "docs/pictures/dashboard-org.png",
    "docs/pictures/dashboard-shard.png",
    "docs/pictures/hostile.png",
    "examples/pushes/pushes.jsonl.gz",
}


def is_text(file: Path) -> bool:
    content = file.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def test_no_wheel_archive_or_program_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    files = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    assert {name for name in files if not is_text(ROOT / name)} == BINARY
