"""Which keys a router verifies tokens with, while the source of the keys changes, fails, hangs or lies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from joserfc.jwk import Key

from router.codec.status import KeysUnavailable
from router.gate.auth.jwks_source import NoAnswer
from router.gate.auth.jwt_key_ring import KeyRing
from router.gate.auth.jwt_settings import JwtSettings
from router.gate.auth.jwt_tokens import JwtTokens
from router.gate.auth.principal import Unauthenticated
from tests.issuers import AUDIENCE, ISSUER, FixedSource, jwks, signing_key, token

OLD, NEW, THIRD = (signing_key("Ed25519", kid) for kid in ("old", "new", "third"))
VALID_S = 86_400.0
BAD_ANSWERS: dict[str, tuple[bytes | Exception, str]] = {
    "a hang": (NoAnswer("it did not answer within 5 s"), "did not answer within 5 s"),
    "HTML": (b"<!DOCTYPE html><title>Log in</title>", "it is not JSON; it begins with '<!DOCTYPE html>"),
    "nothing": (b"", "it is not JSON"),
    "a broken set": (jwks(OLD)[:-9], "it is not JSON"),
    "an empty set": (b'{"keys": []}', "none of its 0 keys can be used"),
    "no set": (b'{"error": "not found"}', "it has no list of keys"),
    "a list": (b"[]", "it has no list of keys"),
    "a set of shared secrets": (b'{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "not with shared secrets"),
    "too many keys": (b'{"keys": [' + b"{}," * 100 + b"{}]}", "it has 101 keys; at most 100 are taken"),
    "deep nesting": (b"[" * 100_000, "it is not JSON"),
    "too many bytes": (b" " * (1024 * 1024 + 1), "more than 1,048,576 bytes"),
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    def __init__(self, *keys: Key, is_deliberate: bool = False) -> None:
        self.source = FixedSource(jwks(*keys), is_deliberate=is_deliberate)
        self.clock = Clock()
        self.ring = KeyRing(self.source, refresh_s=600, valid_s=VALID_S, clock=self.clock)
        settings = JwtSettings(issuer=ISSUER, audiences=(AUDIENCE,), jwks_url=self.source.place)
        self.tokens = JwtTokens(settings, self.ring)

    async def answers(self, answer: bytes | Exception) -> None:
        """Fetches once, with this answer."""
        self.source.answer = answer
        self.clock.now_s += 10
        await self.ring.refresh()

    async def takes(self, key: Key) -> bool:
        try:
            await self.tokens.verify(token(key))
        except Unauthenticated:
            return False
        return True


async def rig(*keys: Key, is_deliberate: bool = False) -> Rig:
    made = Rig(*keys, is_deliberate=is_deliberate)
    await made.ring.refresh()
    return made


@asynccontextmanager
async def running(made: Rig) -> AsyncGenerator[None, None]:
    task = asyncio.create_task(made.ring.run())
    yield
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_bad_answer_changes_nothing_and_is_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    made = await rig(OLD)
    principal = await made.tokens.verify(token(OLD))
    answer, why = BAD_ANSWERS[name]
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            await made.answers(answer)
    assert await made.takes(OLD)
    assert made.tokens.generation == 0
    assert made.tokens.ended(principal) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert why in line
    assert "its 1 known keys stay in use" in line


async def test_keys_that_were_not_confirmed_for_the_stated_time_are_dropped_until_they_are_again() -> None:
    made = await rig(OLD)
    principal = await made.tokens.verify(token(OLD))
    made.source.answer = NoAnswer("it did not answer within 5 s")
    made.clock.now_s += VALID_S - 1
    assert await made.takes(OLD)
    made.clock.now_s += 1
    assert made.tokens.generation == 1
    end = made.tokens.ended(principal)
    assert end is not None
    assert isinstance(end(), KeysUnavailable)
    with pytest.raises(KeysUnavailable, match="without keys of https://id"):
        await made.tokens.verify(token(OLD))
    await made.answers(jwks(OLD))
    assert await made.takes(OLD)


async def test_a_key_that_a_file_no_longer_has_ends_its_tokens() -> None:
    made = await rig(OLD, NEW, is_deliberate=True)
    old, new = [await made.tokens.verify(token(key)) for key in (OLD, NEW)]
    await made.answers(jwks(NEW))
    assert made.tokens.generation == 1
    end = made.tokens.ended(old)
    assert end is not None
    assert "no longer among the keys" in str(end())
    assert made.tokens.ended(new) is None
    assert (await made.takes(OLD), await made.takes(NEW)) == (False, True)


async def test_a_file_that_becomes_an_empty_list_ends_all_tokens_and_its_next_keys_are_taken() -> None:
    made = await rig(OLD, is_deliberate=True)
    principal = await made.tokens.verify(token(OLD))
    await made.answers(b'{"keys": []}')
    assert made.tokens.generation == 1
    end = made.tokens.ended(principal)
    assert end is not None
    assert isinstance(end(), Unauthenticated)
    with pytest.raises(Unauthenticated, match="not among the 0 of"):
        await made.tokens.verify(token(OLD))
    with pytest.raises(Unauthenticated, match="not among the 0 of"):
        await made.tokens.verify(token(OLD, header={"alg": "Ed25519", "typ": "JWT"}))
    # An answer that cannot be read does not count as an empty list, and changes nothing.
    await made.answers(b"")
    with pytest.raises(Unauthenticated):
        await made.tokens.verify(token(OLD))
    await made.answers(jwks(NEW))
    assert (await made.takes(OLD), await made.takes(NEW)) == (False, True)


async def test_a_file_whose_keys_are_all_unusable_is_a_mistake_and_ends_nothing() -> None:
    made = await rig(OLD, is_deliberate=True)
    await made.answers(b'{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}')
    assert await made.takes(OLD)


async def test_a_key_that_a_url_lacks_once_stays_and_one_that_it_lacks_twice_is_gone() -> None:
    made = await rig(OLD, NEW)
    principal = await made.tokens.verify(token(OLD))
    await made.answers(jwks(NEW, THIRD))
    assert [await made.takes(key) for key in (OLD, NEW, THIRD)] == [True, True, True]
    await made.answers(jwks(OLD, NEW, THIRD))
    await made.answers(jwks(NEW, THIRD))
    assert await made.takes(OLD)
    assert made.tokens.generation == 0
    await made.answers(jwks(NEW, THIRD))
    assert not await made.takes(OLD)
    assert made.tokens.generation == 1
    assert made.tokens.ended(principal) is not None


async def test_a_failed_fetch_does_not_count_as_the_second_time() -> None:
    made = await rig(OLD, NEW)
    await made.answers(jwks(NEW))
    await made.answers(b"<html>")
    assert await made.takes(OLD)


async def test_a_key_that_was_replaced_under_its_name_ends_its_tokens_at_once() -> None:
    made = await rig(OLD)
    principal = await made.tokens.verify(token(OLD))
    other = signing_key("ES256", "old")
    await made.answers(jwks(other))
    assert made.tokens.ended(principal) is not None
    await made.tokens.verify(token(other, algorithm="ES256"))
    assert not await made.takes(OLD)


async def test_an_unknown_key_is_asked_for_at_once_but_not_again_and_again() -> None:
    made = await rig(OLD)
    made.source.answer = jwks(OLD, NEW)
    assert not await made.takes(NEW)
    assert made.source.asked == 1
    made.clock.now_s += 10
    assert await made.takes(NEW)
    made.clock.now_s += 10
    for _ in range(100):
        assert not await made.takes(THIRD)
    assert made.source.asked == 3


async def test_calls_with_an_unknown_key_share_one_fetch_and_others_do_not_wait() -> None:
    made = await rig(OLD)
    made.clock.now_s += 10
    made.source.answer = jwks(OLD, NEW)
    made.source.open.clear()
    waiting = [asyncio.create_task(made.takes(NEW)) for _ in range(10)]
    await asyncio.sleep(0)
    assert await made.takes(OLD)
    waiting[0].cancel()
    made.source.open.set()
    assert await asyncio.gather(*waiting[1:]) == [True] * 9
    assert made.source.asked == 2


async def test_a_cold_start_waits_for_the_first_answer() -> None:
    made = Rig(OLD)
    made.source.open.clear()
    async with running(made):
        await asyncio.sleep(0)
        call = asyncio.create_task(made.takes(OLD))
        await asyncio.sleep(0)
        made.source.open.set()
        assert await call


async def test_without_any_keys_nobody_is_called_unauthenticated() -> None:
    made = Rig()
    made.source.answer = NoAnswer("it did not answer within 5 s")
    async with running(made):
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(KeysUnavailable, match="did not answer within 5 s; the router goes on asking"):
                await made.tokens.verify(token(OLD))


async def test_only_so_many_calls_wait_for_a_source_that_hangs() -> None:
    made = Rig(OLD)
    made.source.open.clear()
    async with running(made):
        await asyncio.sleep(0)
        calls = [asyncio.create_task(made.takes(OLD)) for _ in range(1000)]
        await asyncio.sleep(0)
        with pytest.raises(KeysUnavailable, match="1,000 other calls wait"):
            await made.tokens.verify(token(OLD))
        made.source.open.set()
        assert all(await asyncio.gather(*calls))


async def test_a_change_that_the_source_tells_of_is_taken_up() -> None:
    made = Rig(OLD, is_deliberate=True)
    async with running(made):
        await made.ring.refresh()
        made.source.change(jwks(NEW))
        # The second fetch has begun, and ends after the first one.
        await made.source.asked_again.wait()
        await made.ring.refresh()
        assert await made.takes(NEW)


async def test_an_unexpected_error_of_the_source_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made = await rig(OLD)
    await made.answers(ZeroDivisionError("a fault"))
    assert "could not fetch the keys" in caplog.text
    assert await made.takes(OLD)


async def test_a_thousand_rotations_refuse_no_token_of_a_published_key() -> None:
    names = [f"key-{number}" for number in range(6)]
    made = await rig(signing_key("Ed25519", names[0]), is_deliberate=True)
    refused = 0
    for number in range(1000):
        old, new = (signing_key("Ed25519", names[at % len(names)]) for at in (number, number + 1))
        await made.answers(jwks(old, new))
        refused += not await made.takes(old)
        refused += not await made.takes(new)
        await made.answers(jwks(new))
        refused += not await made.takes(new)
        assert not await made.takes(old)
    assert refused == 0
    assert made.tokens.generation == 1000
