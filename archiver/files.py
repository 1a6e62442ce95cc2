"""The files at a place: a directory or a bucket, spoken to in one way. What is written is there whole, or not at all,
and stays there when the power fails.

Knows nothing of jobs. Methods that move much are for threads of their own: they wait for disk and network.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from archiver.errors import FilesFailed, NoSuchFile
from archiver.place import Place

if TYPE_CHECKING:
    from obstore import WritableFile
    from obstore.store import ObjectStore

# Read and sent at once, and held in memory.
_CHUNK_BYTES = 8 * 1024 * 1024
# A day waits for the next pass: better soon than after minutes in which the other days wait too.
_RETRIES, _RETRY_S_MAX = 3, 15
_REQUEST_S_MAX, _CONNECT_S_MAX = 60, 5
_NO_KEYS = "169.254.169.254"
_SAID_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    path: str
    bytes: int
    modified: datetime


class Files:
    """Paths are relative, with slashes. `make`: a directory may be made. Every method raises FilesFailed."""

    def __init__(self, place: Place, *, make: bool = False) -> None:
        self.place = place
        # Where there is a disk whose cache must be written out.
        self._folder = None if place.bucket else Path(place.folder)
        self._store: ObjectStore
        with self.failures(""):
            if place.bucket is None:
                self._store = LocalStore(place.folder, mkdir=make)
            else:
                endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
                self._store = S3Store(
                    place.bucket,
                    prefix=place.folder or None,
                    client_options={
                        "timeout": timedelta(seconds=_REQUEST_S_MAX),
                        "connect_timeout": timedelta(seconds=_CONNECT_S_MAX),
                        "allow_http": endpoint.startswith("http://"),
                    },
                    retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S_MAX)},
                )

    def name(self, path: str) -> str:
        """As people and DuckDB write it."""
        return f"{self.place}/{path}"

    def size(self, path: str) -> int:
        """In bytes. Raises NoSuchFile."""
        with self.failures(path):
            return int(obstore.head(self._store, path)["size"])

    def read(self, path: str) -> bytes:
        """All of it, at once. Raises NoSuchFile."""
        with self.failures(path):
            return bytes(obstore.get(self._store, path).bytes())

    def part(self, path: str, start: int, length: int) -> bytes:
        """Some of it, which must be there. Raises NoSuchFile."""
        with self.failures(path):
            return bytes(obstore.get_range(self._store, path, start=start, length=length))

    def digest(self, path: str) -> tuple[int, str]:
        """How many bytes it has, and their SHA-256. Reads all of it. Raises NoSuchFile."""
        size, hashed = self.size(path), hashlib.sha256()
        for start in range(0, size, _CHUNK_BYTES):
            hashed.update(self.part(path, start, min(_CHUNK_BYTES, size - start)))
        return size, hashed.hexdigest()

    def write(self, path: str, data: bytes) -> None:
        """In the place of what was there."""
        with self.failures(path):
            obstore.put(self._store, path, data)
            self._settle(path)

    def writing(self, path: str) -> Sink:
        """A new file, which is there once it has been committed."""
        with self.failures(path):
            return Sink(self, path, obstore.open_writer(self._store, path, buffer_size=_CHUNK_BYTES, max_concurrency=2))

    def commit(self, path: str, writer: WritableFile) -> None:
        with self.failures(path):
            writer.close()
            self._settle(path)

    def delete(self, path: str) -> None:
        """Also where there is none."""
        with contextlib.suppress(NoSuchFile), self.failures(path):
            obstore.delete(self._store, path)
            if self._folder is not None:
                _flush(self._folder / path)

    def list(self, prefix: str = "") -> Iterator[Found]:
        """The files below this folder, in the order of their paths."""
        found: list[Found] = []
        with self.failures(prefix):
            for chunk in obstore.list(self._store, prefix or None):  # pyright: ignore[reportUnknownMemberType]
                found += [Found(path=one["path"], bytes=one["size"], modified=one["last_modified"]) for one in chunk]
        return iter(sorted(found, key=lambda one: one.path))

    def tidy(self, folder: str) -> None:
        """Removes what a process that was killed had begun to write into a folder of this machine. In a bucket that is
        the bucket's: it can be told to end uploads that were given up."""
        if self._folder is not None:
            with self.failures(folder):
                for left in (self._folder / folder).glob("*#[0-9]*"):
                    left.unlink(missing_ok=True)

    def _settle(self, path: str) -> None:
        """The disk has it, with the folders that lead to it: what is dropped because it is here must not turn out to be
        nowhere."""
        if self._folder is None:
            return
        target = self._folder / path
        _flush(target)
        for folder in target.parents:
            _flush(folder)
            if folder == self._folder:
                break

    @contextlib.contextmanager
    def failures(self, path: str) -> Generator[None, None, None]:
        where = self.name(path).rstrip("/")
        try:
            yield
        except FileNotFoundError as error:
            raise NoSuchFile(f"{where}: there is no such file") from error
        except (BaseError, OSError, ValueError) as error:
            # What follows is written for those who know the library.
            said = " ".join(str(error).partition("Debug source:")[0].split())
            if _NO_KEYS in said:
                said = f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and the machine has no keys: {said}"
            raise FilesFailed(f"{where}: {said[:_SAID_MAX]}{'…' if len(said) > _SAID_MAX else ''}") from error


class Sink(io.RawIOBase):
    """A file that is being written, and what it will be: how long, and its SHA-256. One that is given up, or just left,
    is never there."""

    def __init__(self, files: Files, path: str, writer: WritableFile) -> None:
        super().__init__()
        self._files = files
        self._path = path
        self._writer: WritableFile | None = writer
        self._hashed = hashlib.sha256()
        self.bytes = 0

    @property
    def sha256(self) -> str:
        return self._hashed.hexdigest()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.bytes

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        # What is written after it was given up goes nowhere: whoever writes Parquet ends a file by himself.
        if self._writer is not None:
            self._hashed.update(view)
            with self._files.failures(self._path):
                self._writer.write(bytes(view))
            self.bytes += len(view)
        return len(view)

    def commit(self) -> None:
        writer, self._writer = self._writer, None
        assert writer is not None
        self._files.commit(self._path, writer)

    def give_up(self) -> None:
        self._writer = None


class Source(io.RawIOBase):
    """A file that is read here and there; what lies behind is read along, for that is asked for next."""

    def __init__(self, files: Files, path: str) -> None:
        super().__init__()
        self._files = files
        self._path = path
        self._size = files.size(path)
        self._at = 0
        self._start, self._held = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        length = left if size < 0 else min(size, left)
        if not length:
            return b""
        begin = self._at - self._start
        if begin < 0 or begin + length > len(self._held):
            self._start, begin = self._at, 0
            self._held = self._files.part(self._path, self._at, min(left, max(length, _CHUNK_BYTES)))
        self._at += length
        return self._held[begin : begin + length]


def _flush(path: Path) -> None:
    """Of a file that has been deleted: its folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
