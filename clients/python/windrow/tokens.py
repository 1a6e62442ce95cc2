"""The bearer token of a client's calls: an API key, or another token that its cluster accepts.

A token is never shown: not in a message, a log line or a repr.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from windrow.errors import DeadlineExceeded, InvalidRequest

_Result = TypeVar("_Result")
TOKEN_VARIABLE = "WINDROW_TOKEN"  # noqa: S105 - the name of a variable
Token = str | Callable[[], str | Awaitable[str]]
"""A token, or a function that returns one, such as the content of a file that another program renews. A function that
is not async runs in a thread."""

Metadata = tuple[tuple[str, str], ...]
_CHARS_MAX = 8_192
# After a router has refused a token, callers that try for ever wait this long for a token that is accepted.
RENEWAL_S_MAX = 60.0


class Tokens:
    """Gives a token to each call. A token that the function has returned is used until a router refuses the token.
    `renew` then calls the function again."""

    def __init__(self, token: Token) -> None:
        # Anything that is not a function must be a text.
        self._ask = token if callable(token) else None
        self._metadata = None if callable(token) else _metadata(token)
        self._asking: asyncio.Lock | None = None

    @property
    def may_change(self) -> bool:
        """Whether a function returns the tokens."""
        return self._ask is not None

    @property
    def known(self) -> Metadata:
        """The metadata of a call, or no metadata if the function was not called yet."""
        return self._metadata or ()

    async def metadata(self, *, within_s: float) -> Metadata:
        """Returns the metadata of a call. Raises what the function raises. Raises DeadlineExceeded if the function does
        not return in time."""
        return self.known or await self._asked(None, within_s)

    async def renew(self, refused: Metadata, *, within_s: float) -> bool:
        """Returns whether there is a token other than the refused one. Raises what `metadata` raises."""
        return self._ask is not None and await self._asked(refused, within_s) != refused

    async def _asked(self, refused: Metadata | None, within_s: float) -> Metadata:
        assert self._ask is not None
        if self._asking is None:
            self._asking = asyncio.Lock()
        scope = asyncio.timeout(within_s)
        try:
            async with scope, self._asking:
                # Ask only if no other call has got a new token meanwhile.
                if self._metadata == refused:
                    token = self._ask() if _is_async(self._ask) else await _in_thread(self._ask)
                    self._metadata = _metadata(await token if inspect.isawaitable(token) else token)
        except TimeoutError as error:
            # The function may have raised this error, too.
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"the function of the token did not return in {within_s:.1f} s") from error
        assert self._metadata is not None
        return self._metadata


class Refusals:
    """Decides when a caller that tries for ever gives up, because routers have refused its tokens for too long."""

    def __init__(self, tokens: Tokens | None) -> None:
        self._may_change = tokens is not None and tokens.may_change
        # A router has accepted a token of this caller.
        self._accepted = False
        # The time of the first refusal after the last acceptance, in monotonic seconds. None: there was no refusal
        # since then.
        self._since: float | None = None

    def accepted(self) -> None:
        self._accepted, self._since = True, None

    def is_final(self) -> bool:
        """Returns whether to give up after this refusal. Returns False for RENEWAL_S_MAX if a function returns the
        tokens and a router has accepted an earlier token, because the new token may only be late."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return not (self._may_change and self._accepted and now - self._since < RENEWAL_S_MAX)


def _is_async(function: Callable[[], object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _in_thread(function: Callable[[], _Result]) -> _Result:
    """Calls a function that may read a file or ask a server, and so must not run in the thread of the event loop."""
    try:
        called = asyncio.get_running_loop().run_in_executor(None, _called, function)
    except RuntimeError:
        # The interpreter shuts down and starts no more threads, for example in a handler of atexit.
        return _called(function)
    return await called


def _called(function: Callable[[], _Result]) -> _Result:
    try:
        return function()
    except StopIteration as error:
        # A future cannot carry a StopIteration, so raise another error.
        raise RuntimeError("the function of the token raised StopIteration") from error


def tokens_of(token: Token | None) -> Tokens | None:
    """Returns the Tokens of a client: from `token`, or else from $WINDROW_TOKEN. Returns None if both are missing."""
    given = token if token is not None else os.environ.get(TOKEN_VARIABLE, "").strip() or None
    return None if given is None else Tokens(given)


def _metadata(token: object) -> Metadata:
    """Returns the metadata with a token. Raises InvalidRequest if the token cannot be sent. The error's message does
    not show the token."""
    if not isinstance(token, str):
        raise InvalidRequest(f"token: must be a text, not {type(token).__name__}")
    bare = token.strip()
    if not bare or len(bare) > _CHARS_MAX or not bare.isascii() or not bare.isprintable() or " " in bare:
        raise InvalidRequest(f"token: must be 1 to {_CHARS_MAX:,} ASCII characters without spaces")
    return (("authorization", f"Bearer {bare}"),)
