"""`windrow up`: runs a whole cluster on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from cli.local import LocalCluster

# The file, in the folder of the cluster file, with the API key that --secure prints.
_KEY_FILE = "acme.key"


def up(
    shards: Annotated[
        int | None,
        typer.Option(
            "--shards",
            metavar="N",
            min=1,
            max=16,
            show_default="2, or as many as the data has",
            help="Number of Postgres servers. If the data has fewer shards, new ones are added and slots move there.",
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", min=1, max=64, help="Number of router processes.")
    ] = 2,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="The address that the routers listen on; port 0: any free port."
        ),
    ] = options.ADDRESS_DEFAULT,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            file_okay=False,
            show_default="a folder of your own",
            help="The folder of the data, which stays when the cluster stops.",
        ),
    ] = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Keep no data: delete it when the cluster stops.")
    ] = False,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="From now on, ask callers for an API key. Prints one for the org acme.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Starts a whole cluster on this machine; Ctrl-C stops it.

    Starts a Postgres server for each shard, routers, a balancer and an archiver. The data and the cluster file, which
    you may edit, are kept for the next start. A second Ctrl-C stops at once.
    """
    from cli import local_file
    from embedded import ClusterInUse, EmbeddedError, default_root
    from router.errors import CannotListen, CannotServeMetrics, ListensOpenly, RouterFailed
    from router.settings import host_and_port
    from shard.placement.cluster_file import ClusterFileError

    if ephemeral and data is not None:
        raise typer.BadParameter("an ephemeral cluster keeps no data", param_hint="'--data' / '--ephemeral'")
    try:
        host, port = host_and_port(listen, where="--listen")
    except ClusterFileError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    root = None if ephemeral else default_root() if data is None else data.absolute()
    if port and _is_answered(host, port):
        raise CommandFailed(f"{listen} is in use, most likely by {_user(root, listen, host)}", ExitCode.REFUSED)
    try:
        names = local_file.servers(root, shards)
        cluster = _Up(shards=names, processes=processes, listen=listen, root=root, secure=secure, as_json=as_json)
        asyncio.run(cluster.run())
    except asyncio.CancelledError:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (ListensOpenly, CannotServeMetrics) as error:
        raise CommandFailed(str(error), ExitCode.REFUSED) from error
    except CannotListen as error:
        raise CommandFailed(f"{error} with --listen", ExitCode.REFUSED) from error
    except RouterFailed as error:
        raise CommandFailed(f"{error}; its own message is above", ExitCode.UNAVAILABLE) from error
    except ClusterFileError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    except ClusterInUse as error:
        raise CommandFailed(
            f"another cluster runs on the data in {root}: {_use(root)}, stop it, or name another folder with --data",
            ExitCode.REFUSED,
            particulars=[f"it is another `windrow up`, which has a Postgres server for each shard: {error}"],
        ) from error
    except EmbeddedError as error:
        raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error
    except OSError as error:
        raise CommandFailed(
            f"no data can be kept in {error.filename or root}: {error.strerror}; name another folder with --data",
            ExitCode.REFUSED,
        ) from error
    if cluster.hurried:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _user(root: Path | None, listen: str, host: str) -> str:
    """Returns a text for the user: which cluster probably uses the address, and what to do."""
    from cli import local_file

    other = f"choose another address with --listen, such as {host}:0 for any free port"
    if root is not None and local_file.address(root) == listen:
        return f"the cluster that runs on the data in {root} already: use that one, or stop it; otherwise {other}"
    return f"another cluster; stop that, or {other}"


def _use(root: Path | None) -> str:
    from cli import local_file

    address = "" if root is None else local_file.address(root)
    return f"use that one at {address}" if address else "use that one"


def _is_answered(host: str, port: int) -> bool:
    """Returns whether a server accepts connections at this address. The routers check this too, but only after Postgres
    has started."""
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=0.5):
            return True
    except OSError:
        return False


@dataclass(slots=True, kw_only=True)
class _Up:
    """One run of a local cluster, with its signal handling."""

    # The shards whose Postgres runs on this machine.
    shards: list[str]
    processes: int
    listen: str
    # The data's folder; None for an ephemeral cluster.
    root: Path | None
    # Whether this start has --secure: callers then need an API key, and the command prints one.
    secure: bool
    as_json: bool
    # Whether a second signal stopped the cluster at once.
    hurried: bool = False
    _cluster: LocalCluster | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Runs until signalled. Raises what local_cluster raises, and CancelledError if signalled during the start."""
        from cli import local_file
        from cli.local import local_cluster

        # The log format of the router processes.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        starting = asyncio.current_task()
        assert starting is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, starting)
        async with contextlib.AsyncExitStack() as stack:
            servers, routers = output.counted(len(self.shards), "Postgres server"), self._routers()
            with output.working(f"starting {servers} and {routers}"):
                self._cluster = await stack.enter_async_context(
                    local_cluster(
                        shards=self.shards,
                        processes=self.processes,
                        listen=self.listen,
                        root=self.root,
                        secure=self.secure,
                    )
                )
                key = await _key(self._cluster.config) if self.secure else None
            if self.root is not None:
                local_file.keep_address(self.root, self._cluster.address)
            self._announce(self._cluster, key)
            await self._stop.wait()
            output.note("stopping; another Ctrl-C stops at once")
            with output.working("waiting for calls in flight, then stopping Postgres"):
                await stack.aclose()
        output.note("stopped" if self.root is None else f"stopped; the data stays in {self.root}")

    def _signalled(self, starting: asyncio.Task[object]) -> None:
        if self._cluster is None:
            output.note("stopping once the servers that are starting can be stopped")
            starting.cancel()
        elif not self._stop.is_set():
            self._stop.set()
        else:
            self.hurried = True
            for pid in self._cluster.routers.pids:
                _send(pid, signal.SIGKILL)
            for server in self._cluster.postgres.values():
                # SIGQUIT is what Postgres calls an immediate shutdown: the server recovers at its next start.
                _send(server.pid, signal.SIGQUIT)

    def _routers(self) -> str:
        return output.counted(self.processes, "router process")

    def _announce(self, cluster: LocalCluster, key: str | None) -> None:
        if self.as_json:
            output.say_json(
                [
                    {
                        "address": cluster.address,
                        "config": str(cluster.config),
                        "data": None if self.root is None else str(self.root),
                        "postgres": {name: server.pid for name, server in cluster.postgres.items()},
                        "routers": cluster.routers.pids,
                        "key": key,
                    }
                ]
            )
            return
        command, place = _how_to_call()
        at = "" if cluster.address == options.ADDRESS_DEFAULT else f" --address {cluster.address}"
        data = "none is kept" if self.root is None else f"in {self.root}; it is kept"
        enqueue = f'{command} enqueue acme mail greet \'{{"to": "ada"}}\'{at}'
        pasted = [enqueue, f"{command} dequeue acme mail --ack{at}", f"{command} stats acme --finished{at}"]
        needs = may = ""
        if key is not None:
            pasted.insert(0, f"export WINDROW_TOKEN={key}")
            may = (
                f"\nThe key is for the org acme, and has the scopes {', '.join(_scopes())}.\n"
                f"Calls about all orgs, such as {command} shards, need another one:\n\n"
                f"  {command} keys create --all-orgs --scope cluster --config {shlex.quote(str(cluster.config))}\n"
            )
        elif "auth" in databases.read(cluster.config).tables:
            # This start has no --secure, but an earlier start had it, or somebody has edited the file.
            needs = (
                "\nThis cluster asks callers for an API key: set WINDROW_TOKEN to one for the org acme before you "
                "paste.\nA start with --secure prints one.\n"
            )
        lines = "\n  ".join(pasted)
        output.say(
            f"""\
Windrow is up at {cluster.address}: {output.counted(len(cluster.shards), "shard")}, {self._routers()}.
Data: {data}.
Cluster file: {cluster.config}
{needs}
Try it in another terminal{place}:

  {lines}
{may}
Ctrl-C stops it."""
        )


def _how_to_call() -> tuple[str, str]:
    """Returns how to call this command from another terminal, and in which folder."""
    root = Path(__file__).resolve().parent.parent
    if os.access(root / "run", os.X_OK):
        return "./run windrow", f", in {root}"
    return "windrow", ""


def _scopes() -> list[str]:
    from router.gate.auth.scopes import Scope

    return [scope.value for scope in Scope if scope is not Scope.CLUSTER]


async def _key(config: Path) -> str:
    """Returns an API key for the org acme: the key of earlier starts, or a new key. Stores the key in the folder of the
    cluster file, where the passwords of the databases are stored too."""
    from embedded.folders import write_file
    from shard.admin import api_keys
    from shard.vocabulary import OrgId

    path = config.with_name(_KEY_FILE)
    async with databases.catalog_of(databases.read(config)) as database:
        text = path.read_text().strip() if path.exists() else ""
        if (known := api_keys.parse(text)) is not None:
            stored = (await api_keys.find(database, [known.id])).keys.get(known.id)
            if stored is not None and stored.secret_sha256 == known.secret_sha256 and not stored.revoked:
                return text
        _, text = await api_keys.create(
            database, org=OrgId("acme"), scopes=_scopes(), name="windrow up --secure", expires_in_s=None
        )
    write_file(path, text + "\n", mode=0o600)
    return text


def _send(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
