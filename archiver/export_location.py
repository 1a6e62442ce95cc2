"""Where exported days are stored: a directory on this machine, or a bucket of an S3-compatible store. Pure:
archiver/object_store.py does the I/O. A location contains no secrets, because credentials come from the environment. So
the cluster file may be shown to anybody."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_LIKE_THIS = "write a directory, such as /var/lib/windrow/export, or s3://bucket/prefix"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLocation:
    """Created by `parse`."""

    # None: `folder` is the absolute path of a directory.
    bucket: str | None
    # If the location is in a bucket: the prefix, without slashes at its ends. The prefix may be empty.
    folder: str

    @classmethod
    def parse(cls, text: str) -> ExportLocation:
        """Parses an absolute path, file:///path or s3://bucket/prefix. Raises ValueError with a message that says what
        is wrong."""
        scheme, separator, rest = text.partition("://")
        if "@" in rest.partition("/")[0] or any(sign in rest for sign in "?#"):
            # Do not show the text: it may hold a secret.
            raise ValueError(
                "must have no credentials and no options in it: these come from the environment (AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL)"
            )
        if not text.isprintable():
            raise ValueError(f"{text!r} has unprintable characters")
        if not separator:
            return cls(bucket=None, folder=_directory(text, text))
        if scheme == "file":
            host, slash, path = rest.partition("/")
            if host not in {"", "localhost"}:
                raise ValueError(f"{text!r} names a file on another machine ({host}): {_LIKE_THIS}")
            return cls(bucket=None, folder=_directory(slash + unquote(path), text))
        if scheme != "s3":
            raise ValueError(f"{text!r} is neither a directory nor an S3 bucket: {_LIKE_THIS}")
        bucket, path = urlsplit(text).netloc, rest.partition("/")[2].strip("/")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(f"{text!r} names no bucket ({bucket!r}): {_LIKE_THIS}")
        if path and not all(part not in {"", ".", ".."} for part in path.split("/")):
            raise ValueError(f"{text!r} has an empty part, or dots for one, in its prefix: {_LIKE_THIS}")
        return cls(bucket=bucket, folder=path)

    def __str__(self) -> str:
        if self.bucket is None:
            return self.folder
        return f"s3://{self.bucket}/{self.folder}".rstrip("/")


def _directory(path: str, text: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"{text!r} is no absolute path: {_LIKE_THIS}")
    if ".." in PurePosixPath(path).parts:
        raise ValueError(f"{text!r} has .. in it: {_LIKE_THIS}")
    return str(PurePosixPath(path))
