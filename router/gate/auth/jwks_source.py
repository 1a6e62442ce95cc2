"""Where a JSON Web Key Set comes from: a file, or a URL. This module only gets the bytes; jwks.py reads the set."""

from __future__ import annotations

import asyncio
import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from router.gate.auth.jwks import JWKS_BYTES_MAX, shown
from shard.placement.file_watcher import WatchedFiles

_FETCH_S_MAX = 5.0
# A thread may notice up to this much later that its time is over.
_GRACE_S = 1.0
_CHUNK_BYTES = 64 * 1024


class NoAnswer(Exception):
    """The source gave no key set. The message says why."""


class JwksSource(Protocol):
    @property
    def place(self) -> str:
        """The file or the URL, for messages."""
        ...

    # Whether the set is certainly what the operator wants. This is true for a file. The answer of a URL may come from
    # an outdated replica, or from another program.
    is_deliberate: bool

    async def get(self) -> bytes:
        """Returns the bytes of the set, at most one byte more than JWKS_BYTES_MAX. Raises NoAnswer."""
        ...

    async def changed(self) -> None:
        """Waits until the set may differ from the one that `get` returned. For a URL it waits for ever."""
        ...


class JwksFile:
    is_deliberate = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = WatchedFiles(path)

    @property
    def place(self) -> str:
        return str(self._path)

    async def get(self) -> bytes:
        return await asyncio.to_thread(self._read)

    async def changed(self) -> None:
        await self._files.changed()

    def _read(self) -> bytes:
        # Look before reading: a write in between must count as a change.
        self._files.look()
        try:
            with self._path.open("rb") as file:
                return file.read(JWKS_BYTES_MAX + 1)
        except OSError as error:
            raise NoAnswer(f"it cannot be read: {error.strerror}") from error


class JwksUrl:
    is_deliberate = False

    def __init__(self, url: str, *, fetch_s_max: float = _FETCH_S_MAX) -> None:
        self._url = url
        self._fetch_s_max = fetch_s_max
        # The thread of the last fetch. It may still run, because the resolver of the system may hang for longer than
        # any timeout of ours.
        self._thread: threading.Thread | None = None

    @property
    def place(self) -> str:
        return self._url

    async def get(self) -> bytes:
        if self._thread is not None and self._thread.is_alive():
            raise NoAnswer("the fetch before this one still hangs")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()

        def fetch() -> None:
            try:
                got: bytes | Exception = _fetched(self._url, self._fetch_s_max)
            except Exception as error:  # noqa: BLE001 - handed to the loop's thread
                got = error
            # The loop is closed if the router ended meanwhile.
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, answer, got)

        # A daemon, so that a fetch that hangs does not delay the end of the router.
        self._thread = threading.Thread(target=fetch, name="jwks", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(self._fetch_s_max + _GRACE_S):
                return await answer
        except TimeoutError:
            raise NoAnswer(f"it did not answer within {self._fetch_s_max:g} s") from None

    async def changed(self) -> None:
        await asyncio.Event().wait()


def _settle(answer: asyncio.Future[bytes], got: bytes | Exception) -> None:
    if answer.done():
        return
    if isinstance(got, Exception):
        answer.set_exception(got)
    else:
        answer.set_result(got)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: keys come only from the address that the operator wrote."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        fp.close()
        raise NoAnswer(f"it redirects to {shown(newurl)}; if that is right, set jwks_url to it")


def _fetched(url: str, limit_s: float) -> bytes:
    """Gets the URL. Blocks, for about `limit_s` seconds at most. Raises NoAnswer."""
    until = monotonic() + limit_s
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if urlsplit(url).scheme == "http":
        # Plain HTTP is for this machine only, and so never goes through a proxy.
        handlers.append(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "windrow-router"})  # noqa: S310 - the settings allow only https, and http on loopback
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=limit_s) as response:
            return _read(cast("http.client.HTTPResponse", response), until, limit_s)
    except urllib.error.HTTPError as error:
        with error:
            raise NoAnswer(f"it answered HTTP {error.code}") from None
    except TimeoutError:
        raise NoAnswer(f"it did not answer within {limit_s:g} s") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise NoAnswer(f"it did not answer within {limit_s:g} s") from None
        raise NoAnswer(f"it cannot be reached: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"its answer broke off: {type(error).__name__}") from None


def _read(response: http.client.HTTPResponse, until: float, limit_s: float) -> bytes:
    # `read1` returns what has arrived, so a server that sends a byte now and then cannot hold the thread.
    read: Callable[[int], bytes] = response.read1
    got = bytearray()
    while len(got) <= JWKS_BYTES_MAX:
        if monotonic() > until:
            raise NoAnswer(f"its answer was not complete within {limit_s:g} s")
        piece = read(_CHUNK_BYTES)
        if not piece:
            break
        got += piece
    announced = response.headers.get("Content-Length", "")
    if announced.isascii() and announced.isdigit() and len(got) < min(int(announced), JWKS_BYTES_MAX):
        raise NoAnswer(f"its answer broke off after {len(got):,} of {announced} bytes")
    return bytes(got[: JWKS_BYTES_MAX + 1])
