"""Verifies API keys, which are stored in the catalog (shard/admin/api_keys.py), and notices when they are revoked.

A key is looked up in the catalog when a call brings it for the first time. Even many wrong keys cost the catalog only a
few statements a second, because all look-ups that wait share one statement. How many look-ups may wait is shared fairly
between the hosts of callers. Each regular look at the catalog (router/fleet/catalog_copy.py) also reads how often keys
were revoked. Only if this number has changed are the known keys looked up again. So known keys cost the catalog
nothing. authenticator.py remembers the keys that were verified.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from router.fleet.fleet import Fleet
from router.gate.auth.principal import End, Expired, Principal, Revoked, Unauthenticated
from router.gate.auth.scopes import Scope
from router.gate.call import current_call
from router.gate.connections import host_of
from shard.admin import api_keys
from shard.admin.api_keys import StoredKey
from shard.errors import ShardUnavailable
from shard.queue.coalescer import Coalescer
from shard.vocabulary import CATALOG

# The start of a principal's name, before the id of its key.
_NAME = f"key:{api_keys.PREFIX}"
# The shortest time between the beginnings of two statements that look keys up.
_LOOK_UP_S = 0.2
_LOOK_UPS_WAITING_MAX = 1000
_LOOK_UP_S_MAX = 5.0
# How many revoked keys a process remembers. It needs each key only until the calls that brought the key have ended or
# have entered Authenticator.lasting.
_REVOKED_MAX = 10_000
_MALFORMED = f"this is not an API key: one has the form {api_keys.PREFIX}ID_SECRET"
# One message for an unknown id and for a wrong secret.
_UNKNOWN = "this API key is not one of this cluster; `windrow keys create` makes one"
_REVOKED = "this API key was revoked; use another one"
_EXPIRED = "this API key has expired; use another one"


class _LookUp(NamedTuple):
    # The host of the caller (router/gate/connections.py).
    host: str
    key_id: str


class ApiKeys:
    """A verifier of API keys. Known keys stay good for `trusted_s` while the catalog does not answer.

    `changed` is set when keys may have been revoked since they were verified: call `ended` then to learn which keys.
    """

    def __init__(self, fleet: Fleet, *, trusted_s: float) -> None:
        self._fleet = fleet
        self._trusted_s = trusted_s
        self.changed = asyncio.Event()
        # How often keys had been revoked when all known keys were last found good; None: no key was known yet.
        self._revocations: int | None = None
        # When they were last found good, by the event loop's clock.
        self._confirmed_s = -math.inf
        # The ids of keys that are being verified.
        self._verifying = Counter[str]()
        # The names of principals whose keys were revoked while this process knew them, the oldest first.
        self._revoked: dict[str, None] = {}
        self._next_look_up_s = -math.inf
        self._look_ups = Coalescer[_LookUp, StoredKey | None](
            self._look_up,
            weight=lambda _: 1,
            key=lambda look_up: look_up.host,
            on_timeout=lambda: ShardUnavailable(CATALOG, f"no answer within {_LOOK_UP_S_MAX:g} s"),
            acts_max=1,
            wait_s=_LOOK_UP_S_MAX,
            waiting_max=_LOOK_UPS_WAITING_MAX,
        )
        fleet.follow_revocations(self._on_revocations)

    async def verify(self, token: str) -> Principal:
        """Returns the caller who has this key. Raises Unauthenticated, NoAnswer."""
        key = api_keys.parse(token)
        if key is None:
            raise Unauthenticated(_MALFORMED)
        host = host_of(current_call().peer)
        self._verifying[key.id] += 1
        try:
            stored = await self._look_ups.submit(_LookUp(host, key.id))
        finally:
            self._verifying[key.id] -= 1
            if not self._verifying[key.id]:
                del self._verifying[key.id]
        if stored is None or not hmac.compare_digest(stored.secret_sha256, key.secret_sha256):
            raise Unauthenticated(_UNKNOWN)
        if (end := _end_of(stored)) is not None:
            raise end()
        left_s = math.inf if stored.expires_in_s is None else stored.expires_in_s
        principal = Principal(
            name=f"{_NAME}{key.id}",
            org=stored.org,
            # A newer release may know more scopes.
            scopes=frozenset(scope for scope in Scope if scope.value in stored.scopes),
            expires_at=time.time() + left_s,
        )
        self.refuse_revoked(principal)
        return principal

    def refuse_revoked(self, principal: Principal) -> None:
        """Raises Revoked if the key of a principal was revoked while this process knew it. Code that has used `await`
        since the key was verified must call this."""
        if principal.name in self._revoked:
            raise Revoked(_REVOKED)

    async def ended(self, principals: Iterable[Principal]) -> dict[str, End]:
        """Looks up the keys of these principals again, and the keys that are being verified. Returns the reasons why
        keys are no longer good, by the principal's name. Leaves out good keys. Raises ShardUnavailable."""
        began_s = asyncio.get_running_loop().time()
        ids = {_key_id(principal) for principal in principals} | self._verifying.keys()
        found = await self._fleet.find_api_keys(ids)
        self._revocations, self._confirmed_s = found.revocations, began_s
        ends: dict[str, End] = {}
        for key_id in ids:
            stored = found.keys.get(key_id)
            # A catalog that was restored from a backup may have lost the key.
            end = partial(Unauthenticated, _UNKNOWN) if stored is None else _end_of(stored)
            if end is not None:
                ends[f"{_NAME}{key_id}"] = end
            if stored is not None and stored.revoked:
                self._revoked[f"{_NAME}{key_id}"] = None
        for name in list(self._revoked)[:-_REVOKED_MAX]:
            del self._revoked[name]
        return ends

    def distrusted(self) -> End | None:
        """Returns why keys that were verified before cannot be trusted at the moment. None: they can be trusted."""
        away_s = asyncio.get_running_loop().time() - self._confirmed_s
        if away_s <= self._trusted_s:
            return None
        return partial(ShardUnavailable, CATALOG, f"no API key could be checked for {away_s:.0f} s")

    async def record_use(self, principals: Collection[Principal]) -> None:
        """Records that the keys of these principals were used today. Raises ShardUnavailable."""
        await self._fleet.record_api_key_use({_key_id(principal) for principal in principals})

    async def _look_up(self, look_ups: Sequence[_LookUp]) -> list[StoredKey | None]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._next_look_up_s - loop.time())
        self._next_look_up_s = loop.time() + _LOOK_UP_S
        began_s = loop.time()
        found = await self._fleet.find_api_keys({look_up.key_id for look_up in look_ups})
        # A check of the known keys may run at the same time. Only such a check may replace the count, so a look-up sets
        # the count only if there is none yet.
        self._revocations = found.revocations if self._revocations is None else self._revocations
        self._on_revocations(found.revocations, began_s)
        return [found.keys.get(look_up.key_id) for look_up in look_ups]

    def _on_revocations(self, count: int, since_s: float) -> None:
        if self._revocations is None:
            return
        if count == self._revocations:
            self._confirmed_s = since_s
        else:
            self.changed.set()


def is_api_key(token: str) -> bool:
    """Whether a token is meant as an API key."""
    return token.startswith(api_keys.PREFIX)


def has_api_key(principal: Principal) -> bool:
    """Whether a principal was proved by an API key."""
    return principal.name.startswith(_NAME)


def _key_id(principal: Principal) -> str:
    return principal.name.removeprefix(_NAME)


def _end_of(stored: StoredKey) -> End | None:
    """Returns why a key is no longer good."""
    if stored.revoked:
        return partial(Revoked, _REVOKED)
    if stored.expires_in_s is not None and stored.expires_in_s <= 0:
        return partial(Expired, _EXPIRED)
    return None
