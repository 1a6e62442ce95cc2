"""What router/gate/auth remembers, and how many statements in the catalog wrong keys cause."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Coroutine
from typing import Any, cast

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import MethodDescriptor

from router.buffer import Buffer
from router.fleet.fleet import Fleet
from router.gate.admission import Context, Gate
from router.gate.auth import authenticator as authenticators
from router.gate.auth.access import access_of
from router.gate.auth.api_keys import ApiKeys
from router.gate.auth.authenticator import Authenticator
from router.gate.auth.principal import NoCredentials, Principal, Revoked, Unauthenticated
from router.gate.auth.scopes import Scope
from router.gate.auth.settings import auth_settings
from router.gate.tracing import Tracing
from shard.admin import api_keys
from shard.admin.api_keys import FoundKeys, StoredKey
from shard.errors import TooManyWaiting
from shard.placement.cluster_file import ClusterFileError, parse_cluster
from shard.vocabulary import OrgId
from tests.access import METHODS, id_of, scope_of
from windrow.v1 import access_pb2


class Catalog:
    """A fleet whose catalog has these keys. It counts the statements that look for keys."""

    def __init__(self) -> None:
        self.revocations = 0
        self.stored: dict[str, StoredKey] = {}
        self.statements: list[int] = []
        self.used: list[str] = []
        self._on_revocations: Callable[[int, float], None] = lambda _count, _since_s: None

    def new_key(self, *, scopes: Collection[str] = ("read",)) -> str:
        secret = secrets.token_urlsafe(32)
        text = f"wr_{''.join(secrets.choice('abcdefgh') for _ in range(12))}_{secret}"
        key = api_keys.parse(text)
        assert key is not None
        self.stored[key.id] = StoredKey(key.secret_sha256, OrgId("acme"), list(scopes), None, False)
        return text

    def revoke(self, key: str) -> None:
        key_id = id_of(key)[3:]
        self.stored[key_id] = self.stored[key_id]._replace(revoked=True)
        self.revocations += 1

    def look(self) -> None:
        self._on_revocations(self.revocations, asyncio.get_running_loop().time())

    def follow_revocations(self, on_revocations: Callable[[int, float], None]) -> None:
        self._on_revocations = on_revocations

    async def find_api_keys(self, ids: Collection[str]) -> FoundKeys:
        self.statements.append(len(ids))
        await asyncio.sleep(0)
        return FoundKeys(self.revocations, {one: self.stored[one] for one in ids if one in self.stored})

    async def record_api_key_use(self, ids: Collection[str]) -> None:
        self.used += ids


class Caller:
    """The gRPC context of a call with this metadata."""

    def __init__(self, *tokens: str, peer: str = "ipv4:10.0.0.1:1") -> None:
        self._metadata = [("authorization", f"Bearer {token}") for token in tokens]
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
async def door(catalog: Catalog) -> Authenticator:
    return Authenticator(api_keys=ApiKeys(cast("Fleet", catalog), trusted_s=300))


async def who(door: Authenticator, caller: Caller) -> Principal:
    """Makes a call as this caller. Returns its principal."""

    async def serve() -> Principal:
        context = cast("Context", caller)
        GATE.begin(context)
        return await door.principal(context)

    return await asyncio.create_task(serve())


GATE = Gate(Tracing(), Buffer(1 << 20))


def in_loop(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work)


async def test_a_key_is_looked_up_once(catalog: Catalog, door: Authenticator) -> None:
    caller = Caller(catalog.new_key())
    for _ in range(3):
        principal = await who(door, caller)
        assert (principal.org, principal.scopes) == (OrgId("acme"), frozenset({Scope.READ}))
    assert catalog.statements == [1]


async def test_a_call_without_a_token_is_told_so(door: Authenticator) -> None:
    with pytest.raises(NoCredentials, match="authorization"):
        await who(door, Caller())


async def test_an_unknown_key_and_a_wrong_secret_are_told_the_same(catalog: Catalog, door: Authenticator) -> None:
    known = catalog.new_key()
    told: list[str] = []
    for key in (f"wr_{'z' * 12}_{secrets.token_urlsafe(32)}", f"{id_of(known)}_{secrets.token_urlsafe(32)}"):
        with pytest.raises(Unauthenticated) as refused:
            await who(door, Caller(key))
        told.append(str(refused.value))
        assert key not in told[-1]
    assert len(set(told)) == 1


@pytest.mark.parametrize("strangers", ["ipv4:10.0.0.1:{0}", "ipv6:[2001:db8::{0:x}]:1"])
async def test_many_wrong_keys_share_few_statements_and_leave_room_for_other_hosts(
    catalog: Catalog, door: Authenticator, strangers: str
) -> None:
    good = Caller(catalog.new_key(), peer="ipv4:10.0.0.2:1")
    # One host may use all addresses of its IPv6 network.
    wrong = [Caller(f"wr_{'z' * 12}_{secrets.token_urlsafe(32)}", peer=strangers.format(at)) for at in range(1, 2001)]
    floods = [asyncio.create_task(who(door, caller)) for caller in wrong]
    await asyncio.sleep(0)
    assert (await who(door, good)).org == "acme"
    outcomes = await asyncio.gather(*floods, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Unauthenticated, TooManyWaiting}
    assert len(catalog.statements) <= 3


async def test_wrong_keys_take_no_place_of_good_ones(
    catalog: Catalog, door: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticators, "_REMEMBERED_MAX", 2)
    good = Caller(catalog.new_key())
    await who(door, good)
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await who(door, Caller(f"wr_{'z' * 12}_{secrets.token_urlsafe(32)}"))
    looked_up = len(catalog.statements)
    await who(door, good)
    assert len(catalog.statements) == looked_up


async def test_the_proof_that_was_not_used_for_longest_is_forgotten_first(
    catalog: Catalog, door: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticators, "_REMEMBERED_MAX", 2)
    first, second, third, fourth = (Caller(catalog.new_key()) for _ in range(4))
    for caller in (first, second, third, third, fourth):
        await who(door, caller)
    looked_up = len(catalog.statements)
    await who(door, fourth)
    assert len(catalog.statements) == looked_up
    await who(door, first)
    assert len(catalog.statements) == looked_up + 1


async def test_what_lasts_ends_when_its_key_is_revoked_and_nothing_else_does(
    catalog: Catalog, door: Authenticator
) -> None:
    revoked, other = catalog.new_key(), catalog.new_key()
    judging = in_loop(door.run())

    begun = asyncio.Barrier(3)

    async def last(key: str) -> None:
        principal = await who(door, Caller(key))
        with door.lasting(principal):
            await begun.wait()
            await asyncio.Event().wait()

    ends, stays = in_loop(last(revoked)), in_loop(last(other))
    await begun.wait()
    catalog.revoke(revoked)
    catalog.look()
    with pytest.raises(Revoked):
        await ends
    assert not stays.done()
    with pytest.raises(Revoked):
        await who(door, Caller(revoked))
    for task in (stays, judging):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_cancellation_of_the_call_itself_passes_through(catalog: Catalog, door: Authenticator) -> None:
    principal = await who(door, Caller(catalog.new_key()))

    async def last() -> None:
        with door.lasting(principal):
            await asyncio.Event().wait()

    task = in_loop(last())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert door._lasting == set()


async def test_the_use_of_a_key_is_recorded_once_a_day(catalog: Catalog, door: Authenticator) -> None:
    key = catalog.new_key()
    api = door._api_keys
    assert api is not None
    for _ in range(3):
        await who(door, Caller(key))
        for remembered in door._remembered.values():
            door._note_use(remembered)
        await door._record_once(api)
    assert catalog.used == [id_of(key)[3:]]


def method_with(options: descriptor_pb2.MethodOptions, **fields: str) -> MethodDescriptor:
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", dependency=["windrow/v1/access.proto"])
    request = file.message_type.add(name="Request")
    for number, name in enumerate(fields, start=1):
        request.field.add(name=name, number=number, type=9, label=1)
    service = file.service.add(name="S")
    service.method.add(name="M", input_type=".t.Request", output_type=".t.Request", options=options)
    pool = descriptor_pool.DescriptorPool()
    for known in (descriptor_pb2.DESCRIPTOR, access_pb2.DESCRIPTOR):
        pool.AddSerializedFile(known.serialized_pb)
    pool.Add(file)
    return pool.FindServiceByName("t.S").methods_by_name["M"]


def test_every_method_of_the_contract_says_who_may_call_it() -> None:
    scopes = {name: scope_of(name) for name in METHODS}
    assert [name for name, scope in scopes.items() if scope is None] == ["windrow.v1.Queue/GetServerInfo"]
    assert {name for name in scopes if name.startswith("windrow.v1.Cluster/")} == {
        name for name, scope in scopes.items() if scope is Scope.CLUSTER
    }


def test_a_method_that_does_not_say_who_may_call_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"t\.S/M has no \(scope\)"):
        access_of(method_with(descriptor_pb2.MethodOptions(), org=""))


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("api_keys = 1", "api_keys: must be true or false, not 1"),
        ("api_keys = false", "nobody could call"),
        ("api_key = true", "unknown key 'api_key'; did you mean 'api_keys'?"),
        ("api_keys_trusted_seconds = -1", "must be a number from 0 to 86400, not -1"),
        ('api_keys_trusted_seconds = "1h"', "not '1h'"),
    ],
)
def test_a_wrong_table_is_refused(table: str, fault: str) -> None:
    cluster = parse_cluster(f'[[shard]]\nname = "s1"\ndsn = "host=localhost"\n[auth]\n{table}\n', source="cluster.toml")
    with pytest.raises(ClusterFileError, match=r"cluster\.toml: \[auth\]") as refused:
        auth_settings(cluster)
    assert fault in str(refused.value)


def test_without_the_table_nobody_is_asked_and_with_an_empty_one_api_keys_are() -> None:
    shard = '[[shard]]\nname = "s1"\ndsn = "host=localhost"\n'
    assert auth_settings(parse_cluster(shard, source="cluster.toml")) is None
    settings = auth_settings(parse_cluster(f"{shard}[auth]\n", source="cluster.toml"))
    assert settings is not None
    assert settings.api_keys
