"""Replaces API keys, the keys of an issuer of tokens, and the routers' certificate again and again, under a steady load
of `windrow.Client` and `windrow.Worker`. No call may fail, and no job may be missing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
from cryptography import x509
from joserfc import jwt
from joserfc.jwk import OKPKey

import windrow
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import percentile
from bench.stage import Servers
from bench.system import Wrong
from cli.databases import catalog_of, read
from proof.arguments import number, positive
from proof.background import background
from proof.certificates import Authority
from proof.table import Table
from shard.admin import api_keys
from shard.postgres.pool import Database
from shard.vocabulary import OrgId
from windrow.v1 import queue_pb2_grpc, server_pb2

_ORG, _QUEUE = OrgId("bench-rotations"), "rotations"
_SCOPES = ["enqueue", "consume", "read"]
_ISSUER, _AUDIENCE = "https://issuer.bench", "bench"
_ALGORITHM = "Ed25519"
# Routers ask clients to connect again when a connection has this age, so that clients see new certificates.
_CONNECTION_AGE_S = 10
# Routers notice a changed file within 2 s. The issuer signs with a key only after the key has been published for
# _PUBLISHED_S. The key stays published for _KEPT_S after the last signature.
_PUBLISHED_S, _KEPT_S = 3.0, 2.0
# Routers look at a file every 0.5 s. After a change, they read the file only when two looks in a row have found the
# same state. Therefore this is the shortest time between two replacements of a file.
_FILE_PAUSE_S = 1.3
_LANES = 25
_WARM_S = 3.0
# The run fails if a router still accepts a replaced key, or shows a replaced certificate, _EFFECT_S_MAX after the
# replacement. The run also fails if the last jobs take longer than _DRAIN_S_MAX.
_EFFECT_S_MAX, _DRAIN_S_MAX = 15.0, 60.0
_LOOK_S = 0.05
_CALL_S_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    # How many rotations there are: one third each of API keys, of the issuer's keys, and of certificates.
    rotations: int = 1000
    jobs_per_s: int = 1000
    # The pause between two rotations of the same kind of proof. For JWKS the pause is at least _FILE_PAUSE_S.
    pause_s: float = 0.5
    routers: int = 2


@dataclass(slots=True, kw_only=True)
class Rotated:
    """The rotations of one kind of proof. `effect_s`: how long routers still accepted the old proof after each
    rotation, or how long they did not yet show the new certificate."""

    sort: str
    rotations: int = 0
    effect_s: list[float] = field(default_factory=list[float])


@dataclass(slots=True, kw_only=True)
class Load:
    """What the clients did."""

    stored: set[int] = field(default_factory=set[int])
    handled: Counter[int] = field(default_factory=Counter[int])
    # How long each enqueue took, in ms.
    enqueues: list[float] = field(default_factory=list[float])
    failed: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0

    @property
    def missing(self) -> int:
        return len(self.stored - self.handled.keys())


class _ApiKeys:
    """The API keys of the org. `token()` returns the newest key. There are at most two valid keys: when a further key
    is made, the oldest key is revoked."""

    def __init__(self, catalog: Database) -> None:
        self._catalog = catalog
        self._keys = deque[str]()

    def token(self) -> str:
        return self._keys[-1]

    async def rotate(self) -> str | None:
        """Returns the key that was revoked, if any."""
        _, text = await api_keys.create(self._catalog, org=_ORG, scopes=_SCOPES, name="bench", expires_in_s=None)
        self._keys.append(text)
        if len(self._keys) < 3:
            return None
        old = self._keys.popleft()
        parsed = api_keys.parse(old)
        assert parsed is not None
        await api_keys.revoke(self._catalog, parsed.id)
        return old


class _Issuer:
    """Signs tokens, and publishes its keys in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._numbers = itertools.count(1)
        # The keys with the times of their publication, the oldest first.
        self._keys = deque[tuple[float, OKPKey]]()
        self.rotate()

    def token(self) -> str:
        return self._token_of(self._signing())

    def _token_of(self, key: OKPKey) -> str:
        now = int(time.time())
        claims = {"iss": _ISSUER, "aud": _AUDIENCE, "sub": "bench", "iat": now, "exp": now + 3600, "org": _ORG}
        header = {"alg": _ALGORITHM, "kid": key.kid, "typ": "JWT"}
        return jwt.encode(header, claims | {"scope": " ".join(_SCOPES)}, key, algorithms=[_ALGORITHM])

    def rotate(self) -> str | None:
        """Publishes a new key, and drops keys that are not needed any more. Returns a token of a dropped key."""
        now_s = time.monotonic()
        signing = self._signing() if self._keys else None
        gone: str | None = None
        while len(self._keys) > 1 and self._keys[0][1] is not signing and self._replaced_s() + _KEPT_S < now_s:
            gone = self._token_of(self._keys.popleft()[1])
        self._keys.append((now_s, OKPKey.generate_key("Ed25519", {"kid": str(next(self._numbers))})))
        other = self._file.with_suffix(".new")
        other.write_text(json.dumps({"keys": [key.as_dict(private=False) for _, key in self._keys]}))
        os.replace(other, self._file)
        return gone

    def _signing(self) -> OKPKey:
        """Returns the newest key that all routers know."""
        known = [key for at_s, key in self._keys if at_s + _PUBLISHED_S < time.monotonic()]
        return known[-1] if known else self._keys[0][1]

    def _replaced_s(self) -> float:
        """Returns the time at which the issuer stopped signing with its oldest key."""
        return self._keys[1][0] + _PUBLISHED_S


class _Certificate:
    def __init__(self, authority: Authority, certificate: Path, key: Path) -> None:
        self._authority = authority
        self._certificate = certificate
        self._key = key

    def rotate(self) -> int:
        """Replaces the certificate. Returns the serial number of the new certificate."""
        pair = self._authority.sign()
        pair.save(self._certificate, self._key)
        return x509.load_pem_x509_certificate(pair.certificate).serial_number


async def measure(plan: Plan, bench: Bench) -> Found:
    async with bench.stage(shards=1, routers=1) as stage:
        ca, certificate, key, jwks = (stage.file(name) for name in ("ca.crt", "tls.crt", "tls.key", "jwks.json"))
        authority = Authority()
        authority.saved(ca)
        certificates = _Certificate(authority, certificate, key)
        certificates.rotate()
        issuer = _Issuer(jwks)
        config, routers = await stage.routers_with(
            "rotations.toml", _tables(certificate, key, jwks), processes=plan.routers
        )
        async with catalog_of(read(config)) as catalog:
            keys = _ApiKeys(catalog)
            await keys.rotate()
            try:
                rotated, load = await _run(plan, bench, routers, ca, authority, keys, issuer, certificates)
            except windrow.WindrowError as error:
                raise Wrong(f"a worker ended: {error}") from error
    slowest = {one.sort: max(one.effect_s, default=0.0) for one in rotated}
    for wrong in _faults(plan, rotated, load, slowest):
        bench.broken("rotations", wrong)
    return Found(
        scenario="rotations",
        plan=asdict(plan),
        samples=[
            {
                "stored": len(load.stored),
                "missing": load.missing,
                "handled_more_than_once": sum(1 for many in load.handled.values() if many > 1),
                "failed": dict(load.failed),
                "seconds": load.seconds,
                "rotations": {one.sort: one.rotations for one in rotated},
                "effect_s": {one.sort: one.effect_s for one in rotated},
            }
        ],
        tables=[_rotations_table(rotated), _load_table(load)],
    )


def _tables(certificate: Path, key: Path, jwks: Path) -> str:
    return (
        f"\n[router]\nconnection_age_seconds = {_CONNECTION_AGE_S}\n"
        f"\n[tls]\ncertificate = '{certificate}'\nkey = '{key}'\n"
        "\n[auth]\napi_keys = true\n"
        f"\n[auth.jwt]\nissuer = '{_ISSUER}'\naudience = '{_AUDIENCE}'\njwks_file = '{jwks}'\n"
    )


async def _run(
    plan: Plan,
    bench: Bench,
    routers: Servers,
    ca: Path,
    authority: Authority,
    keys: _ApiKeys,
    issuer: _Issuer,
    certificates: _Certificate,
) -> tuple[list[Rotated], Load]:
    """Makes all rotations under load."""
    load, stop = Load(), asyncio.Event()
    third = plan.rotations // 3
    with_keys, with_tokens, certified = (Rotated(sort=sort) for sort in ("API keys", "JWKS", "certificates"))
    channel = grpc.aio.secure_channel(routers.address, grpc.ssl_channel_credentials(authority.pem))
    async with contextlib.AsyncExitStack() as stack:
        stub = queue_pb2_grpc.QueueStub(await stack.enter_async_context(channel))
        # Every job has a number of its own.
        numbers = itertools.count()
        loading = [
            await stack.enter_async_context(
                _client(routers.address, ca, token, plan.jobs_per_s / 2, load, numbers, stop)
            )
            for token in (keys.token, issuer.token)
        ]
        await asyncio.sleep(_WARM_S)
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:

            async def rotate_proofs(
                count: int, rotated: Rotated, rotate: Callable[[], object], *, pause_s: float
            ) -> None:
                for _ in range(count):
                    await asyncio.sleep(pause_s)
                    old = rotate()
                    old = await old if asyncio.iscoroutine(old) else old
                    rotated.rotations += 1
                    if old is not None:
                        group.create_task(_refused(stub, str(old), rotated))
                bench.say(f"{rotated.rotations:,} rotations of {rotated.sort}")

            async def rotate_certificates(count: int) -> None:
                for _ in range(count):
                    await asyncio.sleep(plan.pause_s)
                    await _shown(routers.address, ca, certificates.rotate(), certified)
                    certified.rotations += 1
                bench.say(f"{certified.rotations:,} rotations of {certified.sort}")

            group.create_task(rotate_proofs(plan.rotations - 2 * third, with_keys, keys.rotate, pause_s=plan.pause_s))
            group.create_task(
                rotate_proofs(third, with_tokens, issuer.rotate, pause_s=max(plan.pause_s, _FILE_PAUSE_S))
            )
            group.create_task(rotate_certificates(third))
        stop.set()
        await asyncio.gather(*loading)
        load.seconds = time.monotonic() - began_s + _WARM_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S_MAX):
                while load.missing:  # noqa: ASYNC110 - a loop for a report, which does not wait long
                    await asyncio.sleep(_LOOK_S)
    return [with_keys, with_tokens, certified], load


@contextlib.asynccontextmanager
async def _client(
    address: str,
    ca: Path,
    token: Callable[[], str],
    per_s: float,
    load: Load,
    numbers: Iterable[int],
    stop: asyncio.Event,
) -> AsyncGenerator[asyncio.Future[list[None]], None]:
    """Enqueues at a steady pace until `stop`, and handles jobs until the end of this scope. Yields a future that is
    done when all jobs are enqueued."""
    fresh = iter(numbers)

    async def produce(client: windrow.Client) -> None:
        due_s = time.monotonic()
        while not stop.is_set():
            due_s += _LANES / per_s
            await asyncio.sleep(due_s - time.monotonic())
            one = next(fresh)
            began_s = time.perf_counter()
            try:
                await client.enqueue(_QUEUE, "number", str(one).encode())
            except windrow.WindrowError as error:
                load.failed[f"{type(error).__name__}: {error}"[:200]] += 1
            else:
                load.stored.add(one)
                load.enqueues.append((time.perf_counter() - began_s) * 1000)

    async with (
        windrow.Client(address, org=_ORG, token=token, tls=ca) as producer,
        windrow.Client(address, org=_ORG, token=token, tls=ca) as consumer,
    ):
        worker = windrow.Worker(consumer, _QUEUE, concurrency=100)

        @worker.handler("number")
        async def note(job: windrow.Job) -> None:
            load.handled[int(job.payload)] += 1

        async with background(worker.run()):
            yield asyncio.gather(*(produce(producer) for _ in range(_LANES)))


async def _refused(stub: queue_pb2_grpc.QueueAsyncStub, token: str, rotated: Rotated) -> None:
    """Records how long calls with this token still succeed."""
    began_s = time.monotonic()
    metadata = (("authorization", f"Bearer {token}"),)
    while (now_s := time.monotonic()) < began_s + _EFFECT_S_MAX:
        try:
            await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), metadata=metadata, timeout=_CALL_S_MAX)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                break
        await asyncio.sleep(_LOOK_S)
    rotated.effect_s.append(now_s - began_s)


async def _shown(address: str, ca: Path, serial: int, rotated: Rotated) -> None:
    """Waits until routers show this certificate to a new connection, and records how long that takes."""
    began_s = time.monotonic()
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    while (now_s := time.monotonic()) < began_s + _EFFECT_S_MAX:
        _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        if x509.load_der_x509_certificate(shown).serial_number == serial:
            break
        await asyncio.sleep(_LOOK_S)
    rotated.effect_s.append(now_s - began_s)


def _faults(plan: Plan, rotated: Iterable[Rotated], load: Load, slowest: dict[str, float]) -> Iterable[str]:
    """Yields the first failure of the run, if there is any."""
    if load.failed:
        yield f"{load.failed.total():,} of the calls failed: {load.failed.most_common(1)[0][0]}"
    elif load.missing:
        yield f"{load.missing:,} of {len(load.stored):,} jobs are missing"
    elif not load.stored:
        yield "no job was stored"
    elif sum(one.rotations for one in rotated) != plan.rotations:
        yield "there were fewer rotations than were asked for"
    elif late := [sort for sort, effect_s in slowest.items() if effect_s >= _EFFECT_S_MAX]:
        yield f"a rotation of {', '.join(late)} took no effect within {_EFFECT_S_MAX:g} s"


def _rotations_table(rotated: Iterable[Rotated]) -> Table:
    return Table(
        title="Rotations",
        head=("of", "rotations", "in effect after, s: p50", "p99", "most"),
        rows=[
            (
                one.sort,
                f"{one.rotations:,}",
                *_figures(one.effect_s, 0.5, 0.99, 1.0),
            )
            for one in rotated
        ],
        note="A revoked key, and a token whose key is no longer published, are in effect when a call with them is "
        "refused; a certificate when a new connection is shown it.",
    )


def _load_table(load: Load) -> Table:
    return Table(
        title="Jobs meanwhile, by windrow.Client and windrow.Worker",
        head=("stored", "a second", "enqueue p50, ms", "p99, ms", "failed calls", "missing", "handled more than once"),
        rows=[
            (
                f"{len(load.stored):,}",
                f"{len(load.stored) / load.seconds:,.0f}",
                *_figures(load.enqueues, 0.5, 0.99),
                f"{load.failed.total():,}",
                f"{load.missing:,}",
                f"{sum(1 for many in load.handled.values() if many > 1):,}",
            )
        ],
        note="Half of the clients show an API key, the other half a token. A job whose stream ended with its proof may "
        "be handled once more.",
    )


def _figures(values: Iterable[float], *shares: float) -> Iterable[str]:
    ordered = sorted(values)
    return [f"{percentile(ordered, share):.2f}" if ordered else "–" for share in shares]


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--rotations", type=number(10**6), default=plan.rotations, help="of all three sorts; 1,000")
    parser.add_argument("--rate", type=number(10**5), default=plan.jobs_per_s, help="jobs a second; 1,000")
    parser.add_argument(
        "--pause",
        type=positive,
        default=plan.pause_s,
        help="between two rotations of one sort, in seconds; 0.5, and 1.3 of files",
    )
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 2")


SCENARIO = Scenario(
    help="calls and jobs while API keys, keys of an issuer and certificates are replaced: none may fail or be missing",
    options=_options,
    plan=lambda given: Plan(
        rotations=given.rotations, jobs_per_s=given.rate, pause_s=given.pause, routers=given.routers
    ),
    measure=measure,
    full=lambda _: Plan(rotations=60),
    quick=None,
)
