"""The keys with which one router process verifies JWTs. They are fetched from a source, kept while the source fails,
and dropped when the source drops them.

A source that fails, or that does not answer with a usable key set, changes nothing for `valid_s` seconds. After that
its keys are no longer used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from router.codec.status import KeysUnavailable
from router.gate.auth.jwks import BadKeySet, KeySet, VerificationKey, parse_jwks
from router.gate.auth.jwks_source import JwksSource, NoAnswer
from router.gate.auth.principal import End, Revoked

_log = logging.getLogger(__name__)

# An unknown key makes the process ask the source at once, but no sooner than this after the last time.
_INTERVAL_S_MIN = 10.0
# While there are usable keys, a failed fetch is repeated after about this time, or sooner if `refresh_s` is less.
_RETRY_S_MAX = 60.0
# The most calls that wait for keys.
_WAITING_MAX = 1000
# With how many keys a token without `kid` is tried. There are several only while a key is being replaced.
_TRIED_MAX = 4
# One log line names at most this many keys. One fetch logs a line for at most this many unusable keys.
_LOGGED_MAX = 10


class UnknownKey(Exception):
    """No key of the set verifies this token. The message names the key, and says how long ago the source was asked."""


class KeyRing:
    """`run` must run while tokens are verified."""

    def __init__(
        self,
        source: JwksSource,
        *,
        refresh_s: float,
        valid_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._refresh_s = refresh_s
        self._valid_s = valid_s
        self._clock = clock
        self._keys: Mapping[str, VerificationKey] = {}
        # Whether there are no keys because an operator's file says so.
        self._has_none = False
        self._thumbprints = frozenset[str]()
        # How many keys the source published last.
        self._published = 0
        # Keys that the last good answer did not have, but that the answer before it had.
        self._missed = frozenset[str]()
        self._generation = 0
        self._good_at = self._asked_at = -float("inf")
        # Why the last fetch changed nothing.
        self._trouble = "they were not fetched yet"
        self._unusable: tuple[str, ...] = ()
        self._fetching: asyncio.Task[None] | None = None
        self._waiting = 0

    @property
    def generation(self) -> int:
        """Rises whenever a key is no longer used."""
        self._drop_outdated()
        return self._generation

    async def candidates(self, kid: str | None, algorithm: str) -> Sequence[VerificationKey]:
        """Returns the keys that may have signed a token with these headers, at least one key. Fetches the set if the
        key is not known. Raises KeysUnavailable, UnknownKey."""
        self._drop_outdated()
        if not self._keys and not self._has_none and self._fetching is not None:
            await self._wait(self._fetching)
        if not self._keys and not self._has_none:
            raise self._unavailable()
        if kid is not None and kid not in self._keys and (self._fetching is not None or self._may_ask()):
            await self._wait(self._begin_fetch())
        found = self._named(kid)
        if not found:
            raise UnknownKey(
                f"its key {_shown_kid(kid)} is not among the {len(self._keys)} of {self._source.place}, asked "
                f"{self._since_asked():.0f} s ago. Check that the token comes from the configured issuer"
                f"{f'; the last fetch failed: {self._trouble}' if self._trouble else ''}"
            )
        fitting = [key for key in found if algorithm in key.algorithms]
        if not fitting:
            taken = ", ".join(sorted(found[0].algorithms))
            raise UnknownKey(f"its header says {algorithm}, but its key signs by {taken}")
        return fitting[:_TRIED_MAX]

    def ended(self, thumbprint: str) -> End | None:
        """Returns why tokens that this key has signed are not taken any more, or None if they are still taken."""
        if thumbprint in self._thumbprints:
            return None
        if not self._keys and not self._has_none:
            return self._unavailable
        return partial(
            Revoked,
            f"the key that signed the token is no longer among the keys of {self._source.place}: get a new token",
        )

    async def run(self) -> None:
        """Keeps the keys up to date until cancelled."""
        try:
            while True:
                await asyncio.shield(self._begin_fetch())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._source.changed()
        finally:
            if self._fetching is not None:
                self._fetching.cancel()

    async def refresh(self) -> None:
        """Fetches now, or waits for the fetch that is running."""
        await asyncio.shield(self._begin_fetch())

    def _named(self, kid: str | None) -> list[VerificationKey]:
        if kid is not None:
            return [self._keys[kid]] if kid in self._keys else []
        if self._published > 1:
            raise UnknownKey(
                f"its header has no kid, and {self._source.place} has {self._published} keys. Let the issuer name the "
                "key in its tokens"
            )
        return list(self._keys.values())

    def _begin_fetch(self) -> asyncio.Task[None]:
        if self._fetching is None:
            self._asked_at = self._clock()
            self._fetching = asyncio.create_task(self._fetch())
        return self._fetching

    async def _fetch(self) -> None:
        try:
            # An operator may end all tokens with a file that has no keys. A URL may give a set without keys by mistake.
            self._take(parse_jwks(await self._source.get(), may_be_empty=self._source.is_deliberate))
        except (NoAnswer, BadKeySet) as error:
            self._failed(str(error))
        except Exception:  # noqa: BLE001 - the next fetch tries again
            _log.exception("could not fetch the keys for tokens")
            self._failed("an unexpected error; the router's log has the details")
        finally:
            self._fetching = None

    async def _wait(self, fetch: asyncio.Task[None]) -> None:
        if self._waiting >= _WAITING_MAX:
            others = f"{self._waiting:,} other calls"
            raise KeysUnavailable(f"tokens cannot be verified now: {others} wait for the keys of {self._source.place}")
        self._waiting += 1
        try:
            # The fetch continues if this call is cancelled: other calls wait for it too.
            await asyncio.shield(fetch)
        finally:
            self._waiting -= 1

    def _take(self, answer: KeySet) -> None:
        """Puts a good set into use. If a URL lacks a key, the key is dropped only when the URL lacks it a second time:
        a replica of the issuer may be behind the others."""
        before = self._keys
        absent = before.keys() - answer.keys.keys()
        self._missed = frozenset[str]() if self._source.is_deliberate else frozenset(absent - self._missed)
        self._use({**answer.keys, **{name: before[name] for name in self._missed}})
        self._has_none = not answer.keys
        self._published = len(answer.keys)
        self._good_at = self._clock()
        gone = [key.id for key in before.values() if key.thumbprint not in self._thumbprints]
        if gone:
            self._generation += 1
            _log.info("%s no longer has %s: tokens of these keys are refused", self._source.place, _listed(gone))
        if self._missed:
            kept = _listed(self._missed)
            _log.info("%s lacks %s for the first time: they stay in use until it does again", self._source.place, kept)
        if self._trouble and before:
            _log.info("%s gives usable keys again", self._source.place)
        self._trouble = ""
        if answer.unusable != self._unusable:
            self._unusable = answer.unusable
            for why in answer.unusable[:_LOGGED_MAX]:
                _log.warning("%s: %s", self._source.place, why)

    def _use(self, keys: Mapping[str, VerificationKey]) -> None:
        self._keys = keys
        self._thumbprints = frozenset(key.thumbprint for key in keys.values())

    def _failed(self, why: str) -> None:
        if why != self._trouble:
            kept = "there are no keys to verify tokens with"
            if self._keys:
                kept = f"its {len(self._keys)} known keys stay in use, for {self._valid_left_s():.0f} s at most"
            _log.error("%s: %s; %s", self._source.place, why, kept)
        self._trouble = why
        self._drop_outdated()

    def _drop_outdated(self) -> None:
        if self._keys and self._valid_left_s() <= 0:
            _log.error("%s gave no usable keys for %g s: the keys are dropped", self._source.place, self._valid_s)
            self._missed = frozenset[str]()
            self._use({})
            self._generation += 1

    def _valid_left_s(self) -> float:
        return self._good_at + self._valid_s - self._clock()

    def _since_asked(self) -> float:
        return self._clock() - self._asked_at

    def _may_ask(self) -> bool:
        return self._since_asked() >= _INTERVAL_S_MIN

    def _unavailable(self) -> KeysUnavailable:
        return KeysUnavailable(
            f"tokens cannot be verified now, without keys of {self._source.place}: {self._trouble}; the router goes on "
            "asking"
        )

    def _pause_s(self) -> float:
        """How long until the next fetch. A random part prevents the processes of a cluster from all asking at once."""
        pause = self._refresh_s
        if self._missed or not self._keys:
            pause = _INTERVAL_S_MIN
        elif self._trouble:
            pause = min(pause, _RETRY_S_MAX)
        return max(pause * random.uniform(0.9, 1.1), _INTERVAL_S_MIN)


def _listed(kids: Iterable[str]) -> str:
    return ", ".join(map(_shown_kid, sorted(kids)[:_LOGGED_MAX]))


def _shown_kid(kid: str | None) -> str:
    return "without kid" if kid is None else repr(kid if len(kid) <= 64 else f"{kid[:64]}…")
