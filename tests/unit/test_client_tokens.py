"""The token of a client: where the token comes from, when the client asks for another one, and that the token is not
shown anywhere."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from grpc import StatusCode

import windrow
from tests.unit.client_fake import WAIT_S, FakeRouter, fake_router, refuse
from windrow import Client, ClientClosed, InvalidRequest, PermissionDenied, Unauthenticated, Worker
from windrow.tokens import TOKEN_VARIABLE

SECRET = "wr_abcdefgh2345_" + "s" * 43


def sent(router: FakeRouter) -> list[str]:
    """Returns the tokens of all calls, in order."""
    return [metadata.get("authorization", "").removeprefix("Bearer ") for metadata in router.metadata]


def accepting(router: FakeRouter, *good: str) -> None:
    """Makes the router refuse every Enqueue and every stream whose token is not in `good`."""

    async def enqueue(request: Any, context: Any) -> Any:
        if sent(router)[-1] not in good:
            await refuse(context, StatusCode.UNAUTHENTICATED, reason="CREDENTIALS_EXPIRED")
        return router.plain("Enqueue", request)

    async def consume(stream: Any, context: Any) -> None:
        if sent(router)[-1] not in good:
            await refuse(context, StatusCode.UNAUTHENTICATED, reason="CREDENTIALS_REVOKED")

    router.scripts |= {"Enqueue": enqueue, "Consume": consume}


def one_after_another(*tokens: str) -> tuple[Callable[[], str], deque[str]]:
    """Returns a function and its tokens. Each call of the function removes and returns the first token, except that the
    last token stays."""
    left = deque(tokens)
    return lambda: left.popleft() if len(left) > 1 else left[0], left


@pytest.mark.parametrize("token", ["", " ", "two words", "line\nbreak", "ü", "x" * 9000, 7, None])
async def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(token: Any) -> None:
    async def ask() -> Any:
        return token

    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        with pytest.raises(InvalidRequest, match="token: must be") as refused:
            await client.enqueue("mail", "greet")
        assert not isinstance(token, str) or not token.strip() or token not in str(refused.value)
        assert router.requests == []


@pytest.mark.parametrize("token", ["two words", b"abc", 7])
def test_a_token_that_is_neither_a_text_nor_a_function_is_refused_when_the_client_is_made(token: Any) -> None:
    with pytest.raises(InvalidRequest, match="token: must be") as refused:
        Client("127.0.0.1:9", org="acme", token=token)
    assert str(token) not in str(refused.value)


async def test_a_token_is_sent_with_every_call_and_never_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(TOKEN_VARIABLE, "not-this-one")
    async with fake_router() as router, Client(router.address, org="acme", token=f" {SECRET}\n") as client:
        accepting(router)
        with pytest.raises(Unauthenticated) as refused:
            await client.enqueue("mail", "greet")
        await client.server_info()
        assert sent(router) == [SECRET, SECRET]
        for text in (caplog.text, str(refused.value), repr(refused.value), repr(client), repr(vars(client.calls))):
            assert "s" * 43 not in text


async def test_a_token_is_not_sent_to_another_machine_in_plain_text_unless_the_program_says_so() -> None:
    for address in ("10.1.2.3:7419", "jobs.example.com:7419", "dns:jobs.example.com"):
        with pytest.raises(InvalidRequest, match=f"grpcs://{address}") as refused:
            Client(address, org="acme", token=SECRET)
        assert SECRET not in str(refused.value)
        Client(address, org="acme", token=SECRET, tls=False)
        Client(address, org="acme")
    for address in (
        "127.0.0.1:7419",
        "localhost:7419",
        "[::1]:7419",
        "unix:/run/windrow.sock",
        "grpcs://10.1.2.3:7419",
    ):
        Client(address, org="acme", token=SECRET)


async def test_the_environment_gives_a_token_to_clients_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, f"{SECRET}\n")
    async with fake_router() as router, Client(router.address, org="acme") as client:
        await client.enqueue("mail", "greet")
        monkeypatch.delenv(TOKEN_VARIABLE)
        async with Client(router.address, org="acme") as without:
            await without.enqueue("mail", "greet")
        assert sent(router) == [SECRET, ""]


async def test_a_refused_text_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_router() as router, Client(router.address, org="acme", token="old") as client:
        accepting(router, "new")
        with pytest.raises(Unauthenticated, match="UNAUTHENTICATED, after") as refused:
            await client.enqueue("mail", "greet")
        assert refused.value.reason == "CREDENTIALS_EXPIRED"
        assert len(router.of("Enqueue")) == 1


async def test_who_may_not_do_this_gets_another_error_than_who_is_not_known() -> None:
    async with fake_router() as router, Client(router.address, org="acme", token=lambda: "good") as client:

        async def forbid(_: Any, context: Any) -> None:
            await refuse(context, StatusCode.PERMISSION_DENIED, reason="SCOPE_MISSING")

        router.scripts["Enqueue"] = forbid
        with pytest.raises(PermissionDenied) as refused:
            await client.enqueue("mail", "greet")
        assert not isinstance(refused.value, Unauthenticated)
        assert len(router.of("Enqueue")) == 1


async def test_a_function_is_asked_again_only_when_its_token_is_refused() -> None:
    ask, left = one_after_another("old", "new", "newest")
    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        accepting(router, "old")
        await client.enqueue("mail", "greet")
        await client.enqueue("mail", "greet")
        accepting(router, "new")
        await client.enqueue("mail", "greet")
        assert sent(router) == ["old", "old", "old", "new"]
        assert list(left) == ["newest"]


async def test_a_function_that_returns_the_refused_token_again_is_asked_once() -> None:
    asked = 0

    async def ask() -> str:
        nonlocal asked
        asked += 1
        return "old"

    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        accepting(router, "new")
        with pytest.raises(Unauthenticated):
            await client.enqueue("mail", "greet")
        assert (asked, len(router.of("Enqueue"))) == (2, 1)


async def test_a_call_is_made_with_two_tokens_at_most() -> None:
    ask, _ = one_after_another("first", "second", "third")
    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        accepting(router)
        with pytest.raises(Unauthenticated):
            await client.enqueue("mail", "greet")
        assert sent(router) == ["first", "second"]


async def test_calls_that_are_refused_together_ask_once() -> None:
    ask, left = one_after_another("old", "new", "newest")
    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        accepting(router, "new")
        stored = [client.enqueue_many([windrow.NewJob("mail", "greet")]) for _ in range(5)]
        await asyncio.gather(*stored)
        assert set(sent(router)) == {"old", "new"}
        assert list(left) == ["newest"]


async def test_an_error_of_the_function_reaches_the_caller() -> None:
    def ask() -> str:
        raise FileNotFoundError("token.txt")

    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        with pytest.raises(FileNotFoundError):
            await client.enqueue_many([windrow.NewJob("mail", "greet")])


@pytest.mark.parametrize("refused", [False, True])
async def test_a_function_that_does_not_return_ends_the_call_at_its_timeout(refused: bool) -> None:
    first = asyncio.Event()

    async def ask() -> str:
        if refused and not first.is_set():
            first.set()
            return "old"
        await asyncio.Event().wait()
        raise AssertionError

    async with fake_router() as router, Client(router.address, org="acme", token=ask, timeout=0.5) as client:
        accepting(router)
        wanted = Unauthenticated if refused else windrow.DeadlineExceeded
        with pytest.raises(wanted, match=r"the function of the token did not return in 0\.\d s"):
            await asyncio.wait_for(client.enqueue_many([windrow.NewJob("mail", "greet")]), WAIT_S)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("shared", [False, True])
async def test_closing_a_client_does_not_wait_for_the_function_of_its_token(shared: bool, refused: bool) -> None:
    answers = deque(["old"] if refused else [])
    hanging = asyncio.Event()

    async def ask() -> str:
        if answers:
            return answers.popleft()
        hanging.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with fake_router() as router:
        accepting(router)
        client = Client(router.address, org="acme", token=ask, timeout=10 * WAIT_S)
        call = client.enqueue("mail", "greet") if shared else client.enqueue_many([windrow.NewJob("mail", "greet")])
        calling = asyncio.create_task(call)
        async with asyncio.timeout(WAIT_S):
            await hanging.wait()
            await client.close()
            with pytest.raises(ClientClosed, match="meanwhile"):
                await calling


async def test_a_worker_ends_when_its_client_is_closed_while_the_function_of_its_token_hangs() -> None:
    hanging = asyncio.Event()

    async def ask() -> str:
        hanging.set()
        await asyncio.Event().wait()
        raise AssertionError

    client = Client("127.0.0.1:9", org="acme", token=ask, try_timeout=10 * WAIT_S)
    worker = Worker(client, "mail")
    worker.handler("greet")(print)
    working = asyncio.create_task(worker.run())
    async with asyncio.timeout(WAIT_S):
        await hanging.wait()
        await client.close()
        with pytest.raises(ClientClosed, match="meanwhile"):
            await working


async def test_a_worker_says_that_the_function_of_its_token_does_not_return_and_asks_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = 0

    async def ask() -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return "good"

    async with fake_router() as router, Client(router.address, org="acme", token=ask, try_timeout=0.1) as client:
        worker = Worker(client, "q")
        running = asyncio.create_task(worker.run())
        await router.until(lambda: router.streams)
        worker.stop()
        await running
    assert "the function of the token did not return in 0.1 s" in caplog.text


async def test_a_stream_whose_token_is_refused_is_opened_with_the_next_one() -> None:
    ask, _ = one_after_another("old", "new")
    handled = asyncio.Event()
    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        accepting(router, "old")
        worker = Worker(client, "q")

        @worker.handler("work")
        async def work(_: windrow.Job) -> None:
            handled.set()

        running = asyncio.create_task(worker.run())
        await router.until(lambda: router.streams and router.stream.messages)
        accepting(router, "new")
        router.stream.cut(StatusCode.UNAUTHENTICATED, reason="CREDENTIALS_EXPIRED")
        await router.until(lambda: len(router.streams) == 2 and router.stream.messages)
        router.give()
        async with asyncio.timeout(WAIT_S):
            await handled.wait()
        assert sent(router)[-1] == "new"
        worker.stop()
        await running


async def test_a_function_that_is_not_async_does_not_hold_up_the_event_loop() -> None:
    threads: list[int] = []

    def ask() -> str:
        threads.append(threading.get_ident())
        return "good"

    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        await client.enqueue("mail", "greet")
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


async def test_a_function_that_has_no_more_tokens_fails_the_call() -> None:
    tokens = iter(["old"])
    async with fake_router() as router, Client(router.address, org="acme", token=lambda: next(tokens)) as client:
        accepting(router, "new")
        with pytest.raises(Unauthenticated, match=r"no other token: RuntimeError: .* raised StopIteration"):
            await asyncio.wait_for(client.enqueue("mail", "greet"), WAIT_S)


def once_then(*then: str | Exception) -> tuple[Callable[[], str], deque[str | Exception]]:
    """Returns a function that returns "old", then one of `then` for each call, and then the last of `then` again and
    again. If one of them is an error, the function raises it."""
    left = deque[str | Exception](["old", *then])

    def ask() -> str:
        found = left.popleft() if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    return ask, left


async def test_a_refusal_says_why_there_is_no_other_token() -> None:
    ask, _ = once_then(FileNotFoundError("token.txt"))
    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        accepting(router, "new")
        with pytest.raises(Unauthenticated, match=r"no other token: FileNotFoundError: token\.txt") as refused:
            await client.enqueue_many([windrow.NewJob("mail", "greet")])
        assert isinstance(refused.value.__cause__, FileNotFoundError)


async def test_handlers_go_on_while_a_worker_waits_for_a_token_that_comes_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask, left = once_then(FileNotFoundError("token.txt"), "old", "new")
    begun, finish = asyncio.Event(), asyncio.Event()
    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        accepting(router, "old")
        worker = Worker(client, "q", name="w1")

        @worker.handler("work")
        async def work(_: windrow.Job) -> None:
            begun.set()
            await finish.wait()

        job = router.give()
        async with asyncio.timeout(WAIT_S):
            running = asyncio.create_task(worker.run())
            await begun.wait()
            accepting(router)
            router.stream.cut(StatusCode.UNAUTHENTICATED, reason="CREDENTIALS_EXPIRED")
            await router.until(lambda: list(left) == ["new"])
            finish.set()
            accepting(router, "new")
            await router.until(lambda: router.settled("Ack") == [job.id])
            worker.stop()
            await running
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(
        "w1: the token is refused, and there is no better one; the worker goes on trying for 60 s"
    )
    assert warning.endswith(": FileNotFoundError: token.txt")


async def test_a_worker_that_gets_no_other_token_in_time_ends_with_the_refusal_and_says_what_is_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windrow.tokens.RENEWAL_S_MAX", 0.5)
    begun, finish = asyncio.Event(), asyncio.Event()
    async with fake_router() as router, Client(router.address, org="acme", token=lambda: "old") as client:
        accepting(router, "old")
        worker = Worker(client, "q", name="w1")

        @worker.handler("work")
        async def work(_: windrow.Job) -> None:
            begun.set()
            await finish.wait()

        router.give()
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
            accepting(router)
            router.stream.cut(StatusCode.UNAUTHENTICATED, reason="CREDENTIALS_EXPIRED")
            # The worker has tried the same token again.
            await router.until(lambda: len(router.streams) > 2)
            finish.set()
            with pytest.raises(Unauthenticated):
                await running
    assert caplog.records[-1].getMessage() == "w1: stopped before every outcome was reported; those leases will expire"


async def test_a_worker_whose_tokens_are_all_refused_ends() -> None:
    ask, _ = one_after_another("first", "second", "third")
    async with fake_router() as router, Client(router.address, org="acme", token=ask) as client:
        accepting(router)
        worker = Worker(client, "q")

        @worker.handler("work")
        async def work(_: windrow.Job) -> None:
            pass

        async with asyncio.timeout(WAIT_S):
            with pytest.raises(Unauthenticated):
                await worker.run()
        # If the worker is writing, gRPC may report another error than the router's. The worker then tries the same
        # token again.
        assert list(dict.fromkeys(sent(router))) == ["first", "second"]
