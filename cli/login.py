"""`windrow login` keeps in a profile how to reach a cluster. `windrow logout` removes a profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli import options, output, profiles, token
from cli.exits import CommandFailed, ExitCode

Name = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", show_default=profiles.DEFAULT, help="The profile's name."),
]


def login(
    name: Name = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", show_default="asks", help="The router; grpcs://HOST:PORT: TLS."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", show_default="asks", help="Holds the token; - reads it from standard input."
        ),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            envvar="WINDROW_TLS_CA",
            metavar="FILE",
            exists=True,
            show_default="those of the system",
            help="CAs that the router's certificate may come from (PEM); turns TLS on.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            envvar="WINDROW_TLS_CERTIFICATE",
            metavar="FILE",
            exists=True,
            show_default=False,
            help="Your certificate.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key",
            envvar="WINDROW_TLS_KEY",
            metavar="FILE",
            exists=True,
            show_default=False,
            help="Its private key.",
        ),
    ] = None,
    tls_server_name: Annotated[
        str,
        typer.Option(
            "--tls-server-name",
            envvar="WINDROW_TLS_SERVER_NAME",
            metavar="NAME",
            show_default=False,
            help="The name in the router's certificate, if it is not the address's host.",
        ),
    ] = "",
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Keeps an address, a token and TLS files in a profile, for later commands.

    In a terminal, asks for the address and the token if they are not given. Calls the router first: if that fails,
    nothing is kept. Only you can read the file, ~/.config/windrow/profiles.toml.
    """
    from cli.calls import connect
    from windrow.v1 import server_pb2

    name = name or profiles.name() or profiles.DEFAULT
    if not name.isprintable():
        raise CommandFailed(f"--profile must be a name of printable characters, not {name!r}", ExitCode.USAGE)
    asks = sys.stdin.isatty()
    if address is None:
        address = typer.prompt("Address", default=options.ADDRESS_DEFAULT, err=True) if asks else None
    if address is None:
        raise CommandFailed("--address is missing, and there is no terminal to ask on", ExitCode.USAGE)
    secret = ""
    if token_file is not None:
        secret = token.read(token_file)
    elif asks:
        secret = _ask_token()
    profile = profiles.Profile(
        address=address,
        token=secret,
        tls_ca=_absolute(tls_ca),
        tls_certificate=_absolute(tls_certificate),
        tls_key=_absolute(tls_key),
        tls_server_name=tls_server_name,
    )
    profiles.use(profile)
    with connect(address, timeout) as router:
        info = router.call(router.queue.GetServerInfo, server_pb2.GetServerInfoRequest())
    profiles.keep(name, profile)
    use = "" if name == profiles.DEFAULT else f"; use it with windrow --profile {name}, or WINDROW_PROFILE"
    output.say(f"logged in to {address} (router {info.version}): profile {name!r} in {profiles.path()}{use}")


def logout(name: Name = None) -> None:
    """Removes a profile with its token.

    The token itself stays valid: revoke it, or let it expire.
    """
    name = name or profiles.name() or profiles.DEFAULT
    if not profiles.remove(name):
        raise CommandFailed(f"no profile {name!r} in {profiles.path()}", ExitCode.NOT_FOUND)
    output.say(f"removed profile {name!r} from {profiles.path()}")


def _ask_token() -> str:
    asked: str = typer.prompt("Token (empty for none)", default="", hide_input=True, show_default=False, err=True)
    return token.checked(asked.strip(), where="the token")


def _absolute(file: Path | None) -> str:
    return "" if file is None else str(file.absolute())
