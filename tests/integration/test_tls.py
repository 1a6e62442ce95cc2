"""Tests a router that speaks TLS: which clients it accepts, what it tells the clients that it refuses, and what happens
when certificates change while calls run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

import windrow
from proof.certificates import Authority
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, first_line, running_routers, spawned_routers, until, write_cluster
from tests.streams import new_job
from windrow.v1 import queue_pb2, queue_pb2_grpc, server_pb2

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A folder with the files of a router and its clients."""

    folder: Path
    authority: Authority
    dsn: str

    @property
    def ca(self) -> Path:
        return self.authority.saved(self.folder / "ca.crt")

    def renew(self, authority: Authority | None = None, *, lasts: timedelta = 60 * DAY) -> None:
        """Gives the router a new certificate."""
        (authority or self.authority).sign(lasts=lasts).save(self.folder / "tls.crt", self.folder / "tls.key")

    def client_files(self, authority: Authority, *, lasts: timedelta = 60 * DAY) -> windrow.Tls:
        certificate, key = self.folder / "client.crt", self.folder / "client.key"
        authority.sign("client", lasts=lasts).save(certificate, key)
        return windrow.Tls(ca=self.ca, certificate=certificate, key=key)

    def config(self, *, mutual: bool = False) -> Path:
        path = write_cluster(self.folder / "cluster.toml", {"s1": self.dsn})
        table = f"\n[tls]\ncertificate = '{self.folder / 'tls.crt'}'\nkey = '{self.folder / 'tls.key'}'\n"
        path.write_text(path.read_text() + table + (f"client_ca = '{self.ca}'\n" if mutual else ""))
        return path


def site(postgres: Server, folder: Path, name: str) -> Site:
    made = Site(folder=folder, authority=Authority(), dsn=postgres.create(name))
    made.renew()
    return made


@pytest.fixture(scope="module")
def place(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return site(postgres, tmp_path_factory.mktemp("tls"), "tls")


@pytest.fixture(scope="module")
def routers(place: Site) -> Generator[Routers, None, None]:
    with running_routers(place.config()) as running:
        yield running


@pytest.fixture(scope="module")
def mutual_place(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return site(postgres, tmp_path_factory.mktemp("mutual"), "mutual_tls")


@pytest.fixture(scope="module")
def mutual(mutual_place: Site) -> Generator[Routers, None, None]:
    with running_routers(mutual_place.config(mutual=True)) as running:
        yield running


@pytest.fixture(scope="module")
def plain(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("plain") / "cluster.toml", {"s1": postgres.create("plain_text")})
    with running_routers(config) as running:
        yield running


def client(routers: Routers, tls: windrow.Tls | Path | bool | None = None) -> windrow.Client:
    return windrow.Client(routers.address, org="acme", tls=tls, timeout=PATIENCE_S)


async def refused(routers: Routers, tls: windrow.Tls | Path | bool | None = None) -> str:
    """Returns the error that a client gets if it cannot connect. The client must fail at once, although its timeout is
    a minute."""
    async with client(routers, tls) as made:
        with pytest.raises(windrow.TlsFailed) as told:
            await made.enqueue("mail", "greet")
    return str(told.value)


# Clients that are refused


async def test_a_plain_client_of_a_tls_router_is_told_to_use_tls(routers: Routers) -> None:
    assert "the router takes TLS connections only" in await refused(routers)


async def test_a_tls_client_of_a_plain_router_is_told_that_it_speaks_plain_text(place: Site, plain: Routers) -> None:
    assert "the router does not speak TLS" in await refused(plain, place.ca)


async def test_a_client_that_does_not_trust_the_ca_is_told_so(routers: Routers, tmp_path: Path) -> None:
    told = await refused(routers, Authority("stranger").saved(tmp_path / "other.crt"))
    assert "comes from a CA that this client does not trust" in told
    assert str(tmp_path / "other.crt") in told


async def test_a_client_that_expects_another_name_is_told_so(place: Site, routers: Routers) -> None:
    told = await refused(routers, windrow.Tls(ca=place.ca, server_name="jobs.example.com"))
    assert "the router's certificate is for another name" in told
    assert "jobs.example.com" in told


async def test_a_client_without_a_certificate_is_told_to_show_one(mutual_place: Site, mutual: Routers) -> None:
    assert "it demands a client certificate" in await refused(mutual, mutual_place.ca)


async def test_a_plain_client_of_a_router_that_demands_certificates_is_told_to_use_tls(mutual: Routers) -> None:
    assert "the router takes TLS connections only" in await refused(mutual)


@pytest.mark.parametrize("fault", ["another CA", "expired"])
async def test_a_client_with_a_certificate_that_is_not_accepted_is_told_so(
    mutual_place: Site, mutual: Routers, fault: str
) -> None:
    tls = (
        mutual_place.client_files(Authority())
        if fault == "another CA"
        else mutual_place.client_files(mutual_place.authority, lasts=-DAY)
    )
    told = await refused(mutual, tls)
    assert f"it does not accept the client certificate {tls.certificate}" in told


async def test_a_worker_that_cannot_connect_ends_and_says_why(routers: Routers) -> None:
    async with client(routers) as made:
        with pytest.raises(windrow.TlsFailed, match="the router takes TLS connections only"):
            await windrow.Worker(made, "mail").run()


@pytest.mark.parametrize("tls", [False, True])
async def test_a_router_that_is_away_is_waited_for(place: Site, tls: bool) -> None:
    with socket.socket() as held:
        # No process listens on this port.
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        async with windrow.Client(address, org="acme", tls=place.ca if tls else False, timeout=1.0) as made:
            with pytest.raises((windrow.Unavailable, windrow.DeadlineExceeded)):
                await made.enqueue("mail", "greet")


@pytest.mark.parametrize("tls", [False, True])
async def test_a_server_that_accepts_connections_and_closes_them_is_waited_for(place: Site, tls: bool) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, windrow.Client(address, org="acme", tls=place.ca if tls else False, timeout=1.0) as made:
        with pytest.raises((windrow.Unavailable, windrow.DeadlineExceeded)):
            await made.enqueue("mail", "greet")


# Clients that are accepted


async def test_a_client_that_trusts_the_ca_works(place: Site, routers: Routers) -> None:
    async with client(routers, place.ca) as made:
        stored = await made.enqueue("trusted", "greet")
        (job,) = await made.dequeue("trusted")
        assert job.id == stored.id


async def test_the_operating_systems_cas_and_the_environment_are_used(
    place: Site, routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(place.ca))
    async with windrow.Client(f"grpcs://{routers.address}", org="acme") as made:
        await made.server_info()
    async with client(routers, True) as made:
        await made.server_info()
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setenv("WINDROW_TLS_CA", str(place.ca))
    async with client(routers) as made:
        await made.server_info()
    with windrow.SyncClient(routers.address, org="acme") as sync:
        sync.server_info()


async def test_a_client_with_a_certificate_works_and_another_name_may_be_expected(
    mutual_place: Site, mutual: Routers
) -> None:
    files = mutual_place.client_files(mutual_place.authority)
    tls = windrow.Tls(ca=files.ca, certificate=files.certificate, key=files.key, server_name="localhost")
    async with client(mutual, tls) as made:
        await made.enqueue("mutual", "greet")
        taken: list[windrow.Job] = []
        worker = windrow.Worker(made, "mutual")

        @worker.handler("greet")
        async def greet(job: windrow.Job) -> None:
            taken.append(job)
            worker.stop()

        await worker.run()
        assert len(taken) == 1


async def test_a_client_takes_up_its_new_certificate_when_the_old_one_is_refused(
    mutual_place: Site, mutual: Routers
) -> None:
    tls = mutual_place.client_files(mutual_place.authority, lasts=-DAY)
    async with client(mutual, tls) as made:
        with pytest.raises(windrow.TlsFailed):
            await made.server_info()
        mutual_place.client_files(mutual_place.authority)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(windrow.TlsFailed):
                    await made.server_info()
                    break
                await asyncio.sleep(0.1)


# Certificates that change


@contextlib.asynccontextmanager
async def calling(routers: Routers, ca: Path) -> AsyncGenerator[list[int], None]:
    """Makes calls during the `with` block, over one lasting connection and over new connections. Yields two numbers:
    the calls over the lasting connection, and the calls over new connections. The calls are not tried again, so the
    test fails if one of them fails."""
    made = [0, 0]
    credentials = grpc.ssl_channel_credentials(await asyncio.to_thread(ca.read_bytes))
    options = [("grpc.use_local_subchannel_pool", 1)]

    async def over_one() -> None:
        async with grpc.aio.secure_channel(routers.address, credentials, options=options) as channel:
            stub: queue_pb2_grpc.QueueAsyncStub = queue_pb2_grpc.QueueStub(channel)
            while True:
                request = queue_pb2.EnqueueRequest(org="acme", jobs=[new_job()])
                await stub.Enqueue(request, timeout=PATIENCE_S)
                made[0] += 1

    async def over_new_ones() -> None:
        while True:
            async with grpc.aio.secure_channel(routers.address, credentials, options=options) as channel:
                stub: queue_pb2_grpc.QueueAsyncStub = queue_pb2_grpc.QueueStub(channel)
                await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=PATIENCE_S)
            made[1] += 1

    tasks = [asyncio.create_task(over_one()), asyncio.create_task(over_new_ones())]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()


def said(routers: Routers, words: str, times: int) -> None:
    until(lambda: routers.log.read_text().count(words) >= times, f"the log says {words!r}, {times} time(s)")


async def more(made: list[int]) -> None:
    """Waits for more calls, both over the lasting connection and over new connections."""
    before = list(made)
    await asyncio.to_thread(
        until, lambda: all(now > then + 2 for now, then in zip(made, before, strict=True)), "there are more calls"
    )


async def test_no_call_fails_while_certificates_change_and_while_new_ones_are_broken(
    place: Site, routers: Routers
) -> None:
    async with calling(routers, place.ca) as made:
        for at in range(1, 6):
            place.renew()
            routers.supervisor.send_signal(signal.SIGHUP)
            await asyncio.to_thread(said, routers, "new TLS files are in use", at)
            await more(made)
        (place.folder / "tls.key").write_bytes(b"broken")
        await asyncio.to_thread(said, routers, "the previous ones stay in use", 1)
        await more(made)
        assert routers.log.read_text().count("tls.key: is not a PEM private key") == 1
        place.renew()
        await asyncio.to_thread(said, routers, "new TLS files are in use", 6)
        await more(made)


async def test_open_connections_go_on_when_new_ones_are_refused(postgres: Server, tmp_path: Path) -> None:
    own = site(postgres, tmp_path, "tls_expired")
    with running_routers(own.config()) as running:
        async with client(running, own.ca) as made:
            await made.server_info()
            own.renew(lasts=-DAY)
            until(lambda: "expired on" in running.log.read_text(), "the log says that it has expired")
            await made.server_info()
            assert "the router's certificate has expired" in await refused(running, own.ca)
            own.renew()
            until(lambda: running.log.read_text().count("new TLS files are in use") == 2, "there is a new one")
            async with client(running, own.ca) as late:
                await late.server_info()


def test_a_router_whose_files_cannot_be_used_does_not_start(postgres: Server, tmp_path: Path) -> None:
    own = site(postgres, tmp_path, "tls_broken")
    (tmp_path / "tls.key").write_bytes(b"broken")
    log = tmp_path / "log"
    with spawned_routers(own.config(), log, listen="127.0.0.1:0") as supervisor:
        assert first_line(supervisor) == ""
        assert supervisor.wait(PATIENCE_S) == 1
    assert "tls.key: is not a PEM private key" in log.read_text()


def test_a_router_does_not_listen_to_others_without_protection(postgres: Server, tmp_path: Path) -> None:
    config = write_cluster(tmp_path / "cluster.toml", {"s1": postgres.create("exposed")})
    log = tmp_path / "log"
    with spawned_routers(config, log, listen="0.0.0.0:0") as supervisor:
        assert first_line(supervisor) == ""
        assert supervisor.wait(PATIENCE_S) == 1
    assert f"refusing to listen on 0.0.0.0:0 without [tls] and [auth] in {config}" in log.read_text()
