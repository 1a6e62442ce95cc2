"""Functions in the database: which migrations install the texts of the functions, and which values of the Python code
the functions repeat."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from shard.postgres import schema
from shard.postgres.schema import Migration
from shard.vocabulary import RETENTION_DEFAULT

FUNCTIONS = Path(schema.__file__).parent / "functions"


def test_the_newest_migration_that_installs_a_function_installs_its_current_text() -> None:
    """If this test fails because the file of a function has changed, a new migration must install the function."""
    newest: dict[str, str] = {}
    for migration in schema.migrations():
        assert len(migration.installs) == migration.script.count(b"-- INSTALL"), migration.name
        newest |= migration.installs
    assert newest == {name: hashlib.sha256((FUNCTIONS / f"{name}.sql").read_bytes()).hexdigest() for name in newest}


def test_a_migration_keeps_its_checksum_when_the_text_of_a_function_that_it_installs_changes() -> None:
    text = (FUNCTIONS / "fold_room.sql").read_bytes()
    for digest, is_current in ((hashlib.sha256(text).hexdigest().encode(), True), (b"0" * 64, False)):
        script = b"SELECT 1;\n-- INSTALL functions/fold_room.sql " + digest + b"\nSELECT 2;\n"
        migration = Migration(number=9000, name="installs", script=script)
        assert migration.checksum == hashlib.sha256(script).hexdigest()
        whole = b"SET LOCAL check_function_bodies = off;\nSELECT 1;\n" + text + b"\nSELECT 2;\n"
        assert (migration.statements == whole) is is_current
        assert text in migration.statements


def test_a_migration_says_what_it_locks_and_reads_and_keeps_its_checksum_when_this_is_corrected() -> None:
    lines = b"-- LOCKS SHARE ROW EXCLUSIVE: queue\n-- LOCKS SHARE: dead, job\n-- READS: dead, job\n"
    migration = Migration(number=9000, name="locks", script=lines + b"-- Why.\nSELECT 1;\n")
    assert migration.locks == {"dead": "SHARE", "job": "SHARE", "queue": "SHARE ROW EXCLUSIVE"}
    assert migration.reads == ["dead", "job"]
    assert migration.checksum == hashlib.sha256(b"-- Why.\nSELECT 1;\n").hexdigest()


def test_one_function_knows_the_default_retention() -> None:
    """If this test fails because the default has changed, a new migration must replace this function."""
    texts = {file.stem: file.read_text() for file in FUNCTIONS.glob("*.sql")}
    found = {name: numbers for name, text in texts.items() if (numbers := re.findall(r"IS NOT NULL\), (\d+)\)", text))}
    assert found == {"kept_days": [str(RETENTION_DEFAULT)]}
