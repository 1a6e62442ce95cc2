"""Where SQL statements are stored, and which packages run them."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from shard.admin import statements as admin
from shard.health import statements as health
from shard.history import statements as history
from shard.placement import statements as placement
from shard.postgres import statements as postgres
from shard.postgres.sql_loader import Statement, load
from shard.queue import statements as queue
from shard.schedules import statements as schedules
from shard.workflows import statements as workflows

SHARD = Path(__file__).resolve().parents[2] / "shard"
PACKAGES = {
    "admin": admin,
    "health": health,
    "history": history,
    "placement": placement,
    "postgres": postgres,
    "queue": queue,
    "schedules": schedules,
    "workflows": workflows,
}
# Which statements of other packages a package may run. A key has the package that runs the statements, and the package
# that owns them.
SHARED = {
    ("admin", "placement"): {"ADOPT_ORGS", "ADOPT_QUEUES", "LOCK_QUEUES"},
    ("admin", "postgres"): {"PROBE_DISK"},
    ("admin", "queue"): {"FIND_KNOWN"},
    ("health", "postgres"): {"FIND_MISSING_PARTITIONS", "PROBE_DISK"},
    ("history", "placement"): {"INSERT_NAMES", "LOCK_QUEUES", "LOCK_SLOTS"},
    ("history", "postgres"): {"LOCK_EXCLUSIVE"},
    ("placement", "postgres"): {"COMPARE_MARK", "LOCK_EXCLUSIVE", "READ_IDENTITY"},
    ("queue", "placement"): {"INSERT_NAMES", "INSERT_QUEUES"},
    ("queue", "postgres"): {"WAIT_FOR_STANDBY"},
    ("workflows", "placement"): {"FOLD_WORKFLOWS"},
}


def loaded(package: str) -> dict[str, Statement]:
    return {name: value for name, value in vars(PACKAGES[package]).items() if isinstance(value, Statement)}


def test_every_sql_file_is_loaded_under_its_own_name() -> None:
    for package in PACKAGES:
        files = {path.stem for path in (SHARD / package / "sql").glob("*.sql")}
        assert files == {statement.file for statement in loaded(package).values()}
        assert all(name == statement.name.upper() for name, statement in loaded(package).items())


def test_every_statement_is_run_by_its_own_package_and_by_those_that_are_named_here() -> None:
    run: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for path in SHARD.rglob("*.py"):
        tree = ast.parse(path.read_text())
        owners = {
            alias.asname or alias.name: node.module.removeprefix("shard.")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            if alias.name == "statements"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in owners:
                run[path.parent.name, owners[node.value.id]].add(node.attr)
    assert {pair: names for pair, names in run.items() if len(set(pair)) == 2} == SHARED
    for package in PACKAGES:
        assert run[package, package] <= loaded(package).keys()
        assert loaded(package).keys() == set().union(*(names for (_, owner), names in run.items() if owner == package))


def test_includes_are_expanded_with_and_without_an_alias(tmp_path: Path) -> None:
    (tmp_path / "move.sql").write_text("-- A {{comment}}.\nINSERT INTO t ({{job_content}}) SELECT {{job_content(e)}}")
    moved = load(tmp_path, "move").decode()
    assert moved.startswith("INSERT INTO t (kind, payload, attributes, retry, dedup_key, trace")
    assert ") SELECT e.kind, e.payload, e.attributes, e.retry, e.dedup_key, e.trace" in moved
    (tmp_path / "of.sql").write_text("SELECT {{retention_of(e)}} FROM ended e")
    assert load(tmp_path, "of").startswith(b"SELECT coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = e.")
    (tmp_path / "wrong.sql").write_text("SELECT {{job_colums}}")
    with pytest.raises(KeyError, match="job_colums"):
        load(tmp_path, "wrong")
