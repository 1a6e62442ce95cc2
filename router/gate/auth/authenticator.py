"""Finds out who calls, and ends calls whose proof is no longer good.

A proof is verified once and then remembered under the SHA-256 of its token, because this process must keep no token. A
remembered proof ends when it expires, or when its verifier says so. While a stream or a waiting call lasts, its proof
is checked again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from router.gate.auth.api_keys import ApiKeys, has_api_key, is_api_key
from router.gate.auth.principal import End, Expired, NoCredentials, Principal, Unauthenticated
from shard.attempts import attempt

if TYPE_CHECKING:
    from router.gate.auth.certificates import ClientCertificates
    from router.gate.auth.jwt_tokens import JwtTokens

_Context = grpc.aio.ServicerContext[Any, Any]

# How many proofs are remembered. Each takes about 500 bytes.
_REMEMBERED_MAX = 10_000
# The longest token. gRPC limits all metadata of a call to 16 KiB.
_TOKEN_CHARS_MAX = 8_192
# The pause between two checks of the proofs of streams and waiting calls. Such a check does no I/O.
_JUDGE_S = 0.5
# The pause between two records of which keys were used. The use of each key is recorded at most once a day.
_RECORD_S = 60.0
_HEADER, _SCHEME = "authorization", "bearer "
_MISSING = "this cluster wants to know who calls: send a token, as the metadata `authorization: Bearer TOKEN`"
_EXPIRED = "the token, or the client's certificate, has expired; get a new one"


class Verifier(Protocol):
    """Verifies bearer tokens of one kind."""

    async def verify(self, token: str) -> Principal:
        """Returns the caller who has this token. Raises Unauthenticated. Raises ShardError or KeysUnavailable if the
        token cannot be verified now."""
        ...


class _Remembered:
    """A proof that was verified."""

    __slots__ = ("principal", "used")

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        # Whether a caller has used the proof since its use was last recorded.
        self.used = True


class _Lasting:
    """A stream or a waiting call, which ends when its proof ends."""

    __slots__ = ("principal", "task", "why")

    def __init__(self, principal: Principal, task: asyncio.Task[Any]) -> None:
        self.principal = principal
        self.task = task
        # Why the stream or call was ended.
        self.why: Exception | None = None


class Authenticator:
    """An argument is None if the cluster does not take that kind of proof. If a call has a token and a certificate, the
    token decides. `run` must run while calls are served."""

    def __init__(
        self,
        *,
        api_keys: ApiKeys | None,
        jwt: JwtTokens | None = None,
        certificates: ClientCertificates | None = None,
    ) -> None:
        self._api_keys = api_keys
        self._jwt = jwt
        self._certificates = certificates
        # The generation of the issuer's keys when the remembered tokens were last checked.
        self._jwt_generation = 0
        # By the SHA-256 of the token.
        self._remembered = OrderedDict[bytes, _Remembered]()
        self._lasting: set[_Lasting] = set()
        # Principals whose keys were used since uses were last recorded, by name.
        self._used: dict[str, Principal] = {}
        # The names of the principals whose use was recorded already, on the day `_recorded_on`.
        self._recorded = set[str]()
        self._recorded_on = -1

    async def principal(self, context: _Context) -> Principal:
        """Returns who makes a call. Raises Unauthenticated, ShardError, KeysUnavailable."""
        token = _bearer_token(context)
        if token is None:
            return self._bearer_of_certificate(context)
        digest = hashlib.sha256(token.encode()).digest()
        remembered = self._remembered.get(digest)
        if remembered is not None:
            if time.time() >= remembered.principal.expires_at:
                raise _expired()
            remembered.used = True
            return remembered.principal
        principal = await self._verifier(token).verify(token)
        self._remember(digest, principal)
        return principal

    @contextlib.contextmanager
    def lasting(self, principal: Principal) -> Generator[None, None, None]:
        """Ends the work of the current task within this scope when the proof of the principal ends. Then raises
        Unauthenticated, ShardUnavailable or KeysUnavailable."""
        if self._api_keys is not None:
            # The key may have been revoked since the call began.
            self._api_keys.refuse_revoked(principal)
        if self._jwt is not None and (end := self._jwt.ended(principal)) is not None:
            raise end()
        task = asyncio.current_task()
        assert task is not None
        lasting = _Lasting(principal, task)
        self._lasting.add(lasting)
        try:
            yield
        except asyncio.CancelledError:
            if lasting.why is None:
                raise
            task.uncancel()
            raise lasting.why from None
        finally:
            self._lasting.discard(lasting)

    async def run(self) -> None:
        """Runs until cancelled. Forgets keys and tokens that are no longer valid, and ends the calls that used them.
        Records which API keys were used."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._judge())
            if self._api_keys is not None:
                group.create_task(self._follow_revocations(self._api_keys))
                group.create_task(self._record(self._api_keys))
            if self._jwt is not None:
                group.create_task(self._jwt.run())

    def _bearer_of_certificate(self, context: _Context) -> Principal:
        principal = None if self._certificates is None else self._certificates.principal(context.auth_context())
        if principal is None:
            raise NoCredentials(_MISSING)
        if time.time() >= principal.expires_at:
            # gRPC checks the expiry of a certificate in the handshake only.
            raise _expired()
        return principal

    def _verifier(self, token: str) -> Verifier:
        if is_api_key(token) and self._api_keys is not None:
            return self._api_keys
        if self._jwt is not None and not is_api_key(token):
            return self._jwt
        raise Unauthenticated("the bearer token is of no kind that this cluster takes")

    def _remember(self, digest: bytes, principal: Principal) -> None:
        while len(self._remembered) >= _REMEMBERED_MAX:
            # Forget the oldest proof. If it was used, keep it as the newest one, and mark it as unused.
            oldest, remembered = self._remembered.popitem(last=False)
            if remembered.used:
                self._note_use(remembered)
                self._remembered[oldest] = remembered
        self._remembered[digest] = _Remembered(principal)

    # ── The end of proofs ────────────────────────────────────────────────────────────────────────────────────────────

    async def _judge(self) -> None:
        while True:
            await asyncio.sleep(_JUDGE_S)
            await attempt("end calls whose proof has ended", self._judge_once)

    async def _judge_once(self) -> None:
        """Ends calls whose proofs have expired, have lost their issuer's key, or have not been checked for too long."""
        now = time.time()
        self._end(lambda principal: _expired if now >= principal.expires_at else None)
        if self._jwt is not None and self._jwt_generation != (generation := self._jwt.generation):
            self._jwt_generation = generation
            self._forget(self._jwt.ended)
        if self._api_keys is not None and (distrusted := self._api_keys.distrusted()) is not None:
            self._forget(lambda principal: distrusted if has_api_key(principal) else None)

    async def _follow_revocations(self, api_keys: ApiKeys) -> None:
        async def check() -> None:
            ends = await api_keys.ended(filter(has_api_key, self._principals()))
            self._forget(lambda principal: ends.get(principal.name))

        while True:
            await api_keys.changed.wait()
            api_keys.changed.clear()
            # If the check fails, the next look at the catalog sets the event again.
            await attempt("check API keys after a revocation", check)

    def _principals(self) -> Iterator[Principal]:
        yield from (remembered.principal for remembered in self._remembered.values())
        yield from (lasting.principal for lasting in self._lasting)

    def _forget(self, end_of: Callable[[Principal], End | None]) -> None:
        """Forgets the proofs of all principals for which `end_of` returns an end, and ends their calls with this
        end."""
        for digest in [digest for digest, known in self._remembered.items() if end_of(known.principal) is not None]:
            del self._remembered[digest]
        self._end(end_of)

    def _end(self, end_of: Callable[[Principal], End | None]) -> None:
        for lasting in self._lasting:
            if lasting.why is None and (end := end_of(lasting.principal)) is not None:
                lasting.why = end()
                lasting.task.cancel()

    # ── The use of keys ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _record(self, api_keys: ApiKeys) -> None:
        while True:
            await asyncio.sleep(_RECORD_S)
            for remembered in self._remembered.values():
                if remembered.used:
                    self._note_use(remembered)
            await attempt("record the use of API keys", lambda: self._record_once(api_keys))

    def _note_use(self, remembered: _Remembered) -> None:
        remembered.used = False
        if has_api_key(remembered.principal):
            self._used[remembered.principal.name] = remembered.principal

    async def _record_once(self, api_keys: ApiKeys) -> None:
        today = int(time.time() // 86_400)
        if today != self._recorded_on:
            self._recorded_on = today
            self._recorded.clear()
        new = {name: principal for name, principal in self._used.items() if name not in self._recorded}
        if new:
            await api_keys.record_use(new.values())
            self._recorded |= new.keys()
        self._used = {name: principal for name, principal in self._used.items() if name not in self._recorded}


def _expired() -> Exception:
    return Expired(_EXPIRED)


def _bearer_token(context: _Context) -> str | None:
    """Returns the token of a call, or None if it has none. Raises Unauthenticated."""
    token: str | None = None
    for key, value in context.invocation_metadata() or ():
        if key == _HEADER:
            text = value if isinstance(value, str) else value.decode("latin-1")
            if token is not None:
                raise Unauthenticated("the metadata `authorization` is there twice; send one")
            if text[: len(_SCHEME)].lower() != _SCHEME:
                raise Unauthenticated("the metadata `authorization` must have the form `Bearer TOKEN`")
            token = text[len(_SCHEME) :].strip()
            if len(token) > _TOKEN_CHARS_MAX:
                raise Unauthenticated(f"the bearer token has more than {_TOKEN_CHARS_MAX:,} characters")
    return token
