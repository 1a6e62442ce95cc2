"""Watches files on disk by polling them: the cluster file, and the files that it names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from shard.placement.cluster_diff import described, refuse_change
from shard.placement.cluster_file import Cluster, ClusterFileError, digest_of, parse_cluster, read_text

_log = logging.getLogger(__name__)

_POLL_S = 0.5
# Time between two reads of a refused file. A later read may succeed, because a file that it needs may appear, such as a
# secret file.
_RETRY_S = 1.0

# For each file: modification time in ns, size and inode number. None: the file does not exist.
_Stats = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Files on disk. Call `look` before you read them, wait until they have `changed`, and read them again."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._stats: _Stats = ()
        self._hurry = asyncio.Event()

    def look(self) -> None:
        """Remembers the present state of the files. A write after this call counts as a change."""
        self._stats = self._stat_all()

    def hurry(self) -> None:
        """Makes `changed` return at once. Call it when somebody says that a file has changed."""
        self._hurry.set()

    async def changed(self, *, within_s: float | None = None) -> None:
        """Waits until a file differs from the last `look` and nobody is writing to any of the files. Returns at once
        after `hurry`, and after `within_s` seconds in any case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._wait_for_stable_change()
        self._hurry.clear()

    async def _wait_for_stable_change(self) -> None:
        before = self._stats
        while not self._hurry.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), _POLL_S)
            # Run in a thread: the file may be on a slow disk.
            try:
                now = await asyncio.to_thread(self._stat_all)
            except RuntimeError:
                # No thread can be started now. Try again.
                continue
            if now == before != self._stats:
                return
            before = now

    def _stat_all(self) -> _Stats:
        return tuple(map(_stat, self.paths))


class WatchedFile(WatchedFiles):
    """A cluster file on disk. `read` it, wait until it has `changed`, and `read` it again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # The digest of the text that was read last, even if this text was refused. Empty: the file could not be read.
        self.digest = ""
        self._path = path

    def read(self) -> Cluster:
        """Returns the cluster that the file describes now. Raises ClusterFileError."""
        while True:
            # Call `look` before reading, so that a write between these two steps counts as a change.
            self.look()
            self.digest = ""
            text = read_text(self._path)
            self.digest = digest_of(text)
            cluster = parse_cluster(text, source=str(self._path))
            # Also watch the files that the cluster file's `dsn_file` keys name.
            files = (self._path, *cluster.dsn_files)
            if files == self.paths:
                return cluster
            self.paths = files


async def next_usable(file: WatchedFile, before: Cluster, *, judge: Callable[[Cluster], object]) -> Cluster:
    """Returns the next usable cluster file that differs from `before`. A file is refused if it cannot be parsed, or if
    `judge` or `refuse_change` raises ClusterFileError. Then the refusal is logged once, and `before` stays in use."""
    refused: str | None = None
    while True:
        await file.changed(within_s=None if refused is None else _RETRY_S)
        try:
            cluster = await asyncio.to_thread(file.read)
            judge(cluster)
            refuse_change(before, cluster)
        except ClusterFileError as error:
            if file.digest != refused:
                refused = file.digest
                _log.error("the cluster file is refused, %s stays in use: %s", before.digest, error)
            continue
        refused = None
        if cluster != before:
            changes = described(before, cluster)
            _log.info("cluster file %s is in use: %s", cluster.digest, "; ".join(changes) or "no change to the shards")
            return cluster


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
