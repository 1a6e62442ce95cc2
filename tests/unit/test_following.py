"""The watcher that notices changes of the cluster file on disk."""

# These tests may block the event loop with file operations, because nothing else runs in it.
# ruff: noqa: ASYNC240

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import shard.placement.file_watcher
from shard.placement.cluster_file import ClusterFileError, digest_of
from shard.placement.file_watcher import WatchedFile

LONG_S = 10.0
# In this time, the watcher reads the file many times.
SHORT_S = 0.2


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard.placement.file_watcher, "_POLL_S", 0.005)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "s1"
    path.write_text("dbname=db1")
    return path


@pytest.fixture
def path(tmp_path: Path, secret: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(f'[[shard]]\nname = "s1"\ndsn_file = "{secret}"\n')
    return path


async def is_changed(file: WatchedFile) -> bool:
    waiting = asyncio.create_task(file.changed())
    done, _ = await asyncio.wait({waiting}, timeout=SHORT_S)
    waiting.cancel()
    await asyncio.wait({waiting})
    return bool(done)


def replace(path: Path, text: str) -> None:
    """Replaces the file as editors and deployment tools do: renames another file to its name."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


async def test_a_file_that_cannot_be_read_is_told_and_waited_for(path: Path) -> None:
    text = path.read_text()
    path.unlink()
    file = WatchedFile(path)
    with pytest.raises(ClusterFileError, match="No such file"):
        file.read()
    assert file.digest == ""
    path.write_text("[[shard]")
    await asyncio.wait_for(file.changed(), LONG_S)
    with pytest.raises(ClusterFileError, match="not TOML"):
        file.read()
    assert file.digest == digest_of("[[shard]")
    path.write_text(text)
    await asyncio.wait_for(file.changed(), LONG_S)
    assert file.read().digest == file.digest == digest_of(text)


async def test_it_is_changed_when_it_or_its_secret_is_written_or_replaced(path: Path, secret: Path) -> None:
    file = WatchedFile(path)
    assert file.read().shards[0].dsn == "dbname=db1"
    assert not await is_changed(file)
    secret.write_text("dbname=db2")
    await asyncio.wait_for(file.changed(), LONG_S)
    assert file.read().shards[0].dsn == "dbname=db2"
    replace(secret, "dbname=db3")
    await asyncio.wait_for(file.changed(), LONG_S)
    assert file.read().shards[0].dsn == "dbname=db3"
    replace(path, path.read_text() + "weight = 5\n")
    await asyncio.wait_for(file.changed(), LONG_S)
    assert file.read().shards[0].weight == 5
    assert not await is_changed(file)


async def test_a_secret_that_is_named_from_now_on_is_looked_at_from_now_on(path: Path, tmp_path: Path) -> None:
    file = WatchedFile(path)
    file.read()
    other = tmp_path / "other"
    other.write_text("dbname=db5")
    replace(path, path.read_text().replace("/s1", "/other"))
    await asyncio.wait_for(file.changed(), LONG_S)
    assert file.read().shards[0].dsn == "dbname=db5"
    other.write_text("dbname=db6")
    await asyncio.wait_for(file.changed(), LONG_S)
    assert file.read().shards[0].dsn == "dbname=db6"


async def test_it_is_not_read_while_it_is_being_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard.placement.file_watcher, "_POLL_S", 0.1)
    file = WatchedFile(path)
    file.read()
    waiting = asyncio.create_task(file.changed())
    with path.open("a") as writing:
        for _ in range(50):
            writing.write("# more\n")
            writing.flush()
            await asyncio.sleep(0.01)
            assert not waiting.done()
    await asyncio.wait_for(waiting, LONG_S)
    assert file.read().digest == digest_of(path.read_text())


async def test_hurry_ends_the_wait_for_a_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard.placement.file_watcher, "_POLL_S", 3600.0)
    file = WatchedFile(path)
    file.read()
    waiting = asyncio.create_task(file.changed())
    await asyncio.sleep(0)
    file.hurry()
    await asyncio.wait_for(waiting, LONG_S)
    assert not await is_changed(file), "once for each time"
    await asyncio.wait_for(file.changed(within_s=0.01), LONG_S)
