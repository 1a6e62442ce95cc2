"""One interface for files in a directory and for files in a bucket. A file is written completely or not at all, and
survives a power failure.

This module knows nothing about jobs. Call the methods that move much data in a thread, because they block while they
wait for the disk or the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from archiver.errors import FilesFailed, NoSuchFile
from archiver.export_location import ExportLocation

if TYPE_CHECKING:
    from obstore import WritableFile
    from obstore.store import ObjectStore

# How much of a file one read or one upload part holds in memory.
_CHUNK_BYTES = 8 * 1024 * 1024
# Fail soon, because long retries would delay the other days. The next pass tries the failed day again.
_RETRIES, _RETRY_S_MAX = 3, 15
_REQUEST_S_MAX, _CONNECT_S_MAX = 60, 5
_NO_KEYS = "169.254.169.254"
_MESSAGE_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    path: str
    bytes: int
    modified: datetime


class Files:
    """The files of one location. Paths are relative to the location, with slashes. With `make`, the directory is
    created if it does not exist. Every method may raise FilesFailed."""

    def __init__(self, location: ExportLocation, *, make: bool = False) -> None:
        self.location = location
        # The directory, whose files must be flushed to disk. None for a bucket.
        self._folder = None if location.bucket else Path(location.folder)
        if self._folder is not None and not make and not self._folder.exists():
            raise FilesFailed(
                f"{self._folder}: there is no such directory: nothing was exported yet (then create it), or it is on "
                "another machine (then run the command there)"
            )
        self._store: ObjectStore
        with self.failures(""):
            if location.bucket is None:
                self._store = LocalStore(location.folder, mkdir=make)
            else:
                endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
                self._store = S3Store(
                    location.bucket,
                    prefix=location.folder or None,
                    client_options={
                        "timeout": timedelta(seconds=_REQUEST_S_MAX),
                        "connect_timeout": timedelta(seconds=_CONNECT_S_MAX),
                        "allow_http": endpoint.startswith("http://"),
                    },
                    retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S_MAX)},
                )

    def check(self) -> None:
        """If the location is a directory, checks that files can be created in it. If the location is a bucket, does
        nothing, because this method sends no requests."""
        if self._folder is not None:
            with self.failures(""), tempfile.TemporaryFile(dir=self._folder):
                pass

    def name(self, path: str) -> str:
        """Returns the full path or URL of a file, in the form that people and DuckDB use."""
        return f"{self.location}/{path}"

    def size(self, path: str) -> int:
        """Returns the size in bytes. Raises NoSuchFile."""
        with self.failures(path):
            return int(obstore.head(self._store, path)["size"])

    def read(self, path: str) -> bytes:
        """Returns the whole file. Raises NoSuchFile."""
        with self.failures(path):
            return bytes(obstore.get(self._store, path).bytes())

    def part(self, path: str, start: int, length: int) -> bytes:
        """Returns `length` bytes of a file, beginning at `start`. The file must be long enough. Raises NoSuchFile."""
        with self.failures(path):
            return bytes(obstore.get_range(self._store, path, start=start, length=length))

    def digest(self, path: str) -> tuple[int, str]:
        """Reads the whole file and returns its size in bytes and its SHA-256. Raises NoSuchFile."""
        size, hashed = self.size(path), hashlib.sha256()
        for start in range(0, size, _CHUNK_BYTES):
            hashed.update(self.part(path, start, min(_CHUNK_BYTES, size - start)))
        return size, hashed.hexdigest()

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, replacing what was there."""
        with self.failures(path):
            obstore.put(self._store, path, data)
            self._flush_with_folders(path)

    def writing(self, path: str) -> Sink:
        """Opens a new file. The file appears only when it is committed."""
        with self.failures(path):
            return Sink(self, path, obstore.open_writer(self._store, path, buffer_size=_CHUNK_BYTES, max_concurrency=2))

    def commit(self, path: str, writer: WritableFile) -> None:
        with self.failures(path):
            writer.close()
            self._flush_with_folders(path)

    def delete(self, path: str) -> None:
        """Deletes a file, if it exists."""
        with contextlib.suppress(NoSuchFile), self.failures(path):
            obstore.delete(self._store, path)
            if self._folder is not None:
                _flush(self._folder / path)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        """Returns the files below this folder, ordered by path."""
        found: list[FileInfo] = []
        with self.failures(prefix):
            for chunk in obstore.list(self._store, prefix or None):
                found += [
                    FileInfo(path=entry["path"], bytes=entry["size"], modified=entry["last_modified"])
                    for entry in chunk
                ]
        return iter(sorted(found, key=lambda file: file.path))

    def tidy(self, folder: str) -> None:
        """In a directory, removes half-written files that a killed process has left. Does nothing for a bucket: a
        bucket can be configured to end abandoned uploads by itself."""
        if self._folder is not None:
            with self.failures(folder):
                for unfinished in (self._folder / folder).glob("*#[0-9]*"):
                    unfinished.unlink(missing_ok=True)

    def _flush_with_folders(self, path: str) -> None:
        """Flushes the file and its parent folders to disk. The file must survive a power failure, because the database
        then drops the rows that the file contains."""
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
            # The text after "Debug source:" is meant for developers of the library.
            message = " ".join(str(error).partition("Debug source:")[0].split())
            if _NO_KEYS in message:
                message = (
                    f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and the machine has no keys: {message}"
                )
            raise FilesFailed(
                f"{where}: {message[:_MESSAGE_MAX]}{'…' if len(message) > _MESSAGE_MAX else ''}"
            ) from error


class Sink(io.RawIOBase):
    """A file that is being written. `bytes` and `sha256` describe what has been written so far. Without `commit`, the
    file never appears."""

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
        # After `give_up`, ignore writes: the Parquet writer always writes a footer when it is closed.
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
    """A seekable file. Each request to the store also fetches the bytes that follow, because they are usually read
    next."""

    def __init__(self, files: Files, path: str) -> None:
        super().__init__()
        self._files = files
        self._path = path
        self._size = files.size(path)
        self._at = 0
        self._start, self._buffer = 0, b""

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
        remaining = max(0, self._size - self._at)
        length = remaining if size < 0 else min(size, remaining)
        if not length:
            return b""
        begin = self._at - self._start
        if begin < 0 or begin + length > len(self._buffer):
            self._start, begin = self._at, 0
            self._buffer = self._files.part(self._path, self._at, min(remaining, max(length, _CHUNK_BYTES)))
        self._at += length
        return self._buffer[begin : begin + length]


def _flush(path: Path) -> None:
    """Flushes a file to disk. If the file was deleted, flushes its folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
