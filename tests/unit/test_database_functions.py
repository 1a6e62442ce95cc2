"""Functions of the database: CONTRIBUTING.md tells where each is defined, and what they repeat of the code is equal."""

from __future__ import annotations

import re
from pathlib import Path

from shard.vocabulary import RETENTION_DEFAULT

ROOT = Path(__file__).resolve().parents[2]


def test_the_newest_migration_that_defines_each_function_is_listed() -> None:
    newest: dict[str, str] = {}
    for migration in sorted((ROOT / "shard/postgres/migrations").glob("*.sql")):
        defined = re.findall(r"^CREATE (?:OR REPLACE )?FUNCTION windrow\.(\w+)", migration.read_text(), re.MULTILINE)
        newest |= dict.fromkeys(defined, migration.name)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| .+ \| `(\d+_\w+\.sql)` \|$", page, re.MULTILINE)) == newest


def test_one_function_knows_the_default_retention() -> None:
    """If this fails because the default has changed: a new migration must replace this function."""
    newest: dict[str, str] = {}
    for migration in sorted((ROOT / "shard/postgres/migrations").glob("*.sql")):
        newest |= re.findall(r"FUNCTION windrow\.(\w+)(.*?)\$\$;", migration.read_text(), re.DOTALL)
    found = {name: numbers for name, body in newest.items() if (numbers := re.findall(r"IS NOT NULL\), (\d+)\)", body))}
    assert found == {"kept_days": [str(RETENTION_DEFAULT)]}
