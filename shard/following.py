"""A cluster file on disk, looked at again and again. Whoever follows it judges what it says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from shard.cluster import Cluster, ClusterFileError, digest_of, parse_cluster, read_text
from shard.cluster_change import described, refuse_change

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
# What a file that was refused counts on may come to be: a secret, an environment.
_AGAIN_S = 1.0

# Of each file: when it was written, how large it is, and which one it is. None: it is not there.
_Marks = tuple[tuple[int, int, int] | None, ...]


class FollowedFile:
    """`read` it, wait until it has `changed`, and read it again."""

    def __init__(self, path: Path) -> None:
        # Of what was read last, whether or not it could be used; empty: there was nothing to read.
        self.digest = ""
        self._path = path
        # It, and what it named by `dsn_file` when it could be used last.
        self._files: tuple[Path, ...] = (path,)
        self._marks: _Marks = ()
        self._hurry = asyncio.Event()

    def read(self) -> Cluster:
        """What it says now. Raises ClusterFileError."""
        while True:
            # Before they are read: what is written meanwhile is a change.
            self._marks = self._look()
            self.digest = ""
            text = read_text(self._path)
            self.digest = digest_of(text)
            cluster = parse_cluster(text, source=str(self._path))
            files = (self._path, *cluster.dsn_files)
            if files == self._files:
                return cluster
            self._files = files

    def hurry(self) -> None:
        """Somebody says that it has changed."""
        self._hurry.set()

    async def changed(self, *, within_s: float | None = None) -> None:
        """Returns once it is another than the one that was read, and is not being written; at once when told to hurry,
        and after `within_s` in any case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._until_it_rests()
        self._hurry.clear()

    async def _until_it_rests(self) -> None:
        before = self._marks
        while not self._hurry.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), _LOOK_S)
            # In a thread: the file may be on a disk that takes its time.
            now = await asyncio.to_thread(self._look)
            if now == before != self._marks:
                return
            before = now

    def _look(self) -> _Marks:
        return tuple(map(_mark, self._files))


async def next_usable(file: FollowedFile, before: Cluster, *, judge: Callable[[Cluster], object]) -> Cluster:
    """The next cluster file that can be used, other than `before`. One that cannot, or for which `judge` raises
    ClusterFileError, is refused once in the log, and the one before stays in force."""
    refused: str | None = None
    while True:
        await file.changed(within_s=None if refused is None else _AGAIN_S)
        try:
            cluster = await asyncio.to_thread(file.read)
            judge(cluster)
            refuse_change(before, cluster)
        except ClusterFileError as error:
            if file.digest != refused:
                refused = file.digest
                _log.error("the cluster file is refused, %s stays in force: %s", before.digest, error)
            continue
        refused = None
        if cluster != before:
            said = described(before, cluster)
            _log.info("cluster file %s is in force: %s", cluster.digest, "; ".join(said) or "nothing in it is new")
            return cluster


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
