"""CONTRIBUTING.md tells where each function of the database is defined."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_newest_migration_that_defines_each_function_is_listed() -> None:
    newest: dict[str, str] = {}
    for migration in sorted((ROOT / "shard/postgres/migrations").glob("*.sql")):
        defined = re.findall(r"^CREATE (?:OR REPLACE )?FUNCTION windrow\.(\w+)", migration.read_text(), re.MULTILINE)
        newest |= dict.fromkeys(defined, migration.name)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| .+ \| `(\d+_\w+\.sql)` \|$", page, re.MULTILINE)) == newest
