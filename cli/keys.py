"""`windrow keys`: the API keys by which callers prove who they are.

The keys are in the catalog, where routers look them up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output, values
from cli.audit import recorded
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from shard.admin.api_keys import ApiKey
    from shard.vocabulary import Micros

app = App(help="The API keys with which callers prove who they are.")

_EXPIRES_MAX = timedelta(days=3650)
_ALL_ORGS = "all orgs"
Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="SCOPE",
        show_default="enqueue, consume, read",
        help="What the key may do: enqueue, consume, read, admin or cluster; may be repeated.",
    ),
]


@app.command()
def create(
    config: options.Config,
    org: Annotated[
        str | None, typer.Option("--org", metavar="ORG", show_default=False, help="The org that the key is for.")
    ] = None,
    all_orgs: Annotated[bool, typer.Option("--all-orgs", help="The key is for all orgs.")] = False,
    scope: Scopes = None,
    name: Annotated[
        str, typer.Option("--name", metavar="TEXT", show_default=False, help="What the key is for, for people.")
    ] = "",
    expires: Annotated[
        timedelta | None,
        typer.Option(
            "--expires",
            parser=values.duration,
            metavar="DURATION",
            show_default="never",
            help="The key is good for this long, such as 90d.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Creates a key, and prints it on standard output. No command can show the key again.

    An org may have several keys, so that a new one can be handed out before the old one is revoked. The scope `cluster`
    needs --all-orgs.
    """
    from shard.admin import api_keys

    wanted = _scopes(scope)
    if (org is None) != all_orgs:
        raise CommandFailed("give either --org ORG or --all-orgs", ExitCode.USAGE)
    if "cluster" in wanted and org is not None:
        raise CommandFailed("--scope cluster: is about all orgs, and needs --all-orgs", ExitCode.USAGE)
    if len(name) > api_keys.NAME_CHARS_MAX or not name.isprintable():
        raise CommandFailed(f"--name: must be at most {api_keys.NAME_CHARS_MAX} printable characters", ExitCode.USAGE)
    if expires is not None and not timedelta(seconds=1) <= expires <= _EXPIRES_MAX:
        raise CommandFailed("--expires: must be 1 s to 3,650 days", ExitCode.USAGE)
    of_org = None if org is None else options.org_id(org)
    # Choose the random id here, so that the audit log has it.
    key_id = api_keys.draw_id()
    cluster = databases.read(config)

    async def make() -> tuple[ApiKey, str]:
        async with databases.catalog_of(cluster) as database:
            return await api_keys.create(
                database,
                org=of_org,
                scopes=wanted,
                name=name,
                expires_in_s=None if expires is None else round(expires.total_seconds()),
                key_id=key_id,
            )

    if "auth" not in cluster.tables:
        output.note(f"{config} has no [auth]: its routers ask nobody for a key")
    work = recorded(
        cluster, "keys create", make(), org=org or "", key=_shown_id(key_id), scopes=",".join(wanted), name=name
    )
    key, text = databases.asked(work)
    try:
        if as_json:
            output.say_json([{**_json(key), "key": text}])
            return
        output.note(
            f"{_shown_id(key.id)}, for {_for_whom(key)}: {', '.join(key.scopes)}; {_until(key)}. The key is printed "
            "only once, to standard output:"
        )
        output.say(text)
    except CommandFailed as error:
        revoke = f"nobody has this key now: windrow keys revoke {_shown_id(key.id)} --config {config}"
        raise CommandFailed(str(error), error.code, particulars=[revoke]) from error


@app.command("list")
def list_keys(config: options.Config, as_json: options.Json = False) -> None:
    """Lists all keys, the newest first, without their secrets. Includes revoked and expired keys.

    Routers record within a minute that a key was used, once for each UTC day.
    """
    from shard.admin import api_keys

    cluster = databases.read(config)

    async def look() -> list[ApiKey]:
        async with databases.catalog_of(cluster) as database:
            return await api_keys.read_all(database)

    found = asyncio.run(look())
    if as_json:
        output.say_json(map(_json, found))
    elif not found:
        output.note("there is no key")
    else:
        columns = [
            Column(title="key"),
            Column(title="org"),
            Column(title="scopes"),
            Column(title="state", coloured=True),
            Column(title="expires"),
            Column(title="last used"),
            Column(title="name", detail=True),
        ]
        output.table(columns, [_row(key) for key in found])


@app.command()
def revoke(
    config: options.Config,
    key: Annotated[
        str, typer.Argument(metavar="KEY", show_default=False, help="A key's id, as `keys list` prints it.")
    ],
    as_json: options.Json = False,
) -> None:
    """Revokes a key: routers refuse it, and end its streams, within 2 s.

    Revoking it again changes nothing. Exit code 4: there is no such key.
    """
    from shard.admin import api_keys

    key_id = api_keys.parse_id(key)
    if key_id is None:
        # Do not show the text, because it may be a whole key with its secret.
        raise CommandFailed("KEY: must be the id of a key, such as wr_abcdefgh2345, without its secret", ExitCode.USAGE)
    cluster = databases.read(config)

    async def end() -> tuple[ApiKey, bool]:
        async with databases.catalog_of(cluster) as database:
            known = (await api_keys.find(database, [key_id])).keys.get(key_id)
            org = "" if known is None or known.org is None else known.org
            # The audit log records the key's org, which only the catalog knows.
            work = recorded(cluster, "keys revoke", api_keys.revoke(database, key_id), org=org, key=_shown_id(key_id))
            return await work, known is not None and known.revoked

    revoked, already = databases.asked(end())
    if as_json:
        output.say_json([_json(revoked)])
    elif already and revoked.revoked_at is not None:
        output.say(f"{_named(revoked)} was revoked already, at {_time_text(revoked.revoked_at)}")
    else:
        output.say(f"{_named(revoked)} is revoked")


def _scopes(given: Sequence[str] | None) -> list[str]:
    from router.gate.auth.scopes import Scope

    if given is None:
        return [Scope.ENQUEUE.value, Scope.CONSUME.value, Scope.READ.value]
    known = [scope.value for scope in Scope]
    for scope in given:
        if scope not in known:
            raise CommandFailed(f"--scope {scope!r}: is not one of {', '.join(known)}", ExitCode.USAGE)
    return [scope for scope in known if scope in given]


def _shown_id(key_id: str) -> str:
    from shard.admin import api_keys

    return f"{api_keys.PREFIX}{key_id}"


def _named(key: ApiKey) -> str:
    return f"{_shown_id(key.id)} ({_for_whom(key)})"


def _for_whom(key: ApiKey) -> str:
    return output.visible(_ALL_ORGS if key.org is None else f"org {key.org}")


def _until(key: ApiKey) -> str:
    return "it does not expire" if key.expires_at is None else f"it expires at {_time_text(key.expires_at)}"


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expired else "good"


def _row(key: ApiKey) -> Sequence[str]:
    return (
        _shown_id(key.id),
        _ALL_ORGS if key.org is None else key.org,
        ",".join(key.scopes),
        _state(key),
        "never" if key.expires_at is None else _time_text(key.expires_at),
        "never" if key.last_used is None else key.last_used.isoformat(),
        key.name,
    )


def _json(key: ApiKey) -> dict[str, object]:
    return {
        "id": _shown_id(key.id),
        "org": key.org,
        "scopes": list(key.scopes),
        "name": key.name,
        "state": _state(key),
        "created_at": _rfc3339(key.created_at),
        "expires_at": None if key.expires_at is None else _rfc3339(key.expires_at),
        "revoked_at": None if key.revoked_at is None else _rfc3339(key.revoked_at),
        "last_used": None if key.last_used is None else key.last_used.isoformat(),
    }


def _moment(micros: Micros) -> datetime:
    return datetime.fromtimestamp(micros / 1_000_000, UTC)


def _time_text(micros: Micros) -> str:
    return output.time_text(_moment(micros))


def _rfc3339(micros: Micros) -> str:
    return _moment(micros).isoformat().replace("+00:00", "Z")
