"""Key sets from URLs and files: what a server may answer, and that no answer blocks the router."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from proof.certificates import Authority
from router.gate.auth import jwks_source
from router.gate.auth.jwks_source import JwksFile, JwksUrl, NoAnswer
from tests.issuers import KeyServer, key_server, page, put


@pytest.fixture
def server() -> Generator[KeyServer, None, None]:
    with key_server() as served:
        yield served


async def refusal(url: str, *, fetch_s_max: float = 5) -> str:
    with pytest.raises(NoAnswer) as refused:
        await JwksUrl(url, fetch_s_max=fetch_s_max).get()
    return str(refused.value)


async def test_the_answer_of_a_url_is_returned(server: KeyServer) -> None:
    server.answer = page(b'{"keys": []}')
    assert await JwksUrl(server.url).get() == b'{"keys": []}'


async def test_a_server_that_hangs_is_given_up_and_holds_up_nobody(server: KeyServer) -> None:
    server.answer = server.hang
    source = JwksUrl(server.url, fetch_s_max=0.3)
    fetch = asyncio.create_task(source.get())
    # The fetch does not block the loop: otherwise the next check would run only after the fetch.
    await asyncio.sleep(0)
    assert not fetch.done()
    with pytest.raises(NoAnswer, match=r"it did not answer within 0\.3 s"):
        await fetch


async def test_a_server_that_sends_a_byte_now_and_then_is_given_up(server: KeyServer) -> None:
    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while not server.released.wait(0.05):
            request.wfile.write(b" ")

    server.answer = drip
    assert await refusal(server.url, fetch_s_max=0.3) == "its answer was not complete within 0.3 s"


async def test_a_fetch_that_cannot_be_ended_is_not_joined_by_another(
    server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(_url: str, _limit_s: float) -> bytes:
        server.released.wait()
        return b"late"

    monkeypatch.setattr(jwks_source, "_fetched", hang)
    monkeypatch.setattr(jwks_source, "_GRACE_S", 0.05)
    source = JwksUrl(server.url, fetch_s_max=0)
    with pytest.raises(NoAnswer, match="it did not answer within"):
        await source.get()
    with pytest.raises(NoAnswer, match="the fetch before this one still hangs"):
        await source.get()


async def test_a_redirect_is_not_followed(server: KeyServer) -> None:
    server.answer = page(b"", status=302, Location="file:///etc/passwd")
    assert "302" in await refusal(server.url)
    server.answer = page(b"", status=301, Location=f"{server.url}/elsewhere")
    assert (
        await refusal(server.url) == f"it redirects to '{server.url}/elsewhere'; if that is right, set jwks_url to it"
    )
    assert server.asked == 2


async def test_an_error_page_is_no_set(server: KeyServer) -> None:
    server.answer = page(b"{}", status=503)
    assert await refusal(server.url) == "it answered HTTP 503"


async def test_an_answer_that_breaks_off_is_no_set(server: KeyServer) -> None:
    server.answer = page(b'{"keys": []}', Content_Length="500")
    assert await refusal(server.url) == "its answer broke off after 12 of 500 bytes"


async def test_an_endless_answer_is_read_to_its_bound(server: KeyServer) -> None:
    server.answer = page(b" " * (3 << 20))
    assert len(await JwksUrl(server.url).get()) == (1 << 20) + 1


async def test_a_server_that_is_not_there_is_named(server: KeyServer) -> None:
    assert "cannot be reached: " in await refusal("http://127.0.0.1:1/jwks")


async def test_a_fetch_that_is_cancelled_ends_quietly(server: KeyServer) -> None:
    server.answer = server.hang
    fetch = asyncio.create_task(JwksUrl(server.url).get())
    await asyncio.sleep(0)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch


async def test_https_needs_a_certificate_that_the_system_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, context = certified(tmp_path)
    with key_server(context) as served:
        served.answer = page(b'{"keys": []}')
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal(served.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert await JwksUrl(served.url).get() == b'{"keys": []}'


async def test_a_file_is_read_and_its_change_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.placement.file_watcher._POLL_S", 0.005)
    path = tmp_path / "keys.json"
    source = JwksFile(path)
    with pytest.raises(NoAnswer, match="it cannot be read: No such file or directory"):
        await source.get()
    put(path, b"one")
    async with asyncio.timeout(60):
        await source.changed()
    assert await source.get() == b"one"
    unchanged = asyncio.create_task(source.changed())
    done, _ = await asyncio.wait({unchanged}, timeout=0.1)
    assert not done
    put(path, b"two")
    async with asyncio.timeout(60):
        await unchanged
    assert await source.get() == b"two"


def certified(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Returns the certificate file of an authority, and a context with which a local server shows its certificate."""
    authority = Authority()
    path, key_path = folder / "server.pem", folder / "server.key"
    authority.sign().save(path, key_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key_path)
    return authority.saved(folder / "ca.pem"), context
