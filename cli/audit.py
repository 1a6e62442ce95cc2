"""`windrow audit` shows the audit log. `recorded` records commands that change a cluster through its databases."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cli import databases, options, output, values
from cli.exits import CommandFailed, ExitCode
from cli.output import Column

if TYPE_CHECKING:
    from shard.admin.audit import Entry
    from shard.placement.cluster_file import Cluster

_T = TypeVar("_T")
_LIMIT_MAX = 100_000
# The columns of the rows that `entry_row` returns.
COLUMNS = (
    *(Column(title=title) for title in ("at", "who", "from", "what", "org", "queue", "outcome")),
    Column(title="request", detail=True),
)


def audit(
    config: options.Config,
    org: Annotated[
        str | None, typer.Option("--org", metavar="ORG", show_default=False, help="Only what was done to this org.")
    ] = None,
    principal: Annotated[
        str | None,
        typer.Option("--principal", metavar="NAME", show_default=False, help="Only what this principal did."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", metavar="TEXT", show_default=False, help="Only methods whose names contain TEXT."),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            "--since", parser=values.past_moment, metavar="TIME", show_default=False, help="Only entries from TIME on."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=_LIMIT_MAX, help="The newest N entries.")
    ] = 100,
    as_json: options.Json = False,
) -> None:
    """Shows who changed what: calls that change queues or jobs, and commands that change the cluster; newest first.

    Reads of the whole cluster are counted, one line for each caller and minute.
    """
    from archiver.service import opened
    from shard.admin import audit as audit_log
    from shard.vocabulary import CATALOG, Micros

    cluster = databases.read(config)
    since_us = Micros(0 if since is None else round(since.timestamp() * 1_000_000))

    async def look() -> list[Entry]:
        async with opened(CATALOG, cluster.catalog_dsn) as catalog:
            return await audit_log.newest(
                catalog, org=org, principal=principal, method=method, since=since_us, limit=limit
            )

    found = databases.asked(look())
    if as_json:
        output.say_json(map(entry_json, found))
    elif found:
        output.table(COLUMNS, list(map(entry_row, found)))
    elif audit_log.is_on(cluster):
        output.note("no entry matches")
    else:
        output.note(f"{config} has neither [auth] nor [audit]: no audit log is kept")


async def recorded(
    cluster: Cluster, command: str, work: Coroutine[Any, Any, _T], *, org: str = "", **request: object
) -> _T:
    """Does the work of a command that changes the cluster. Before the work begins, records who runs the command.
    Afterwards, records how the work ended. Raises ShardUnavailable, before the work begins, if the catalog does not
    answer."""
    from archiver.service import opened
    from shard.admin import audit as audit_log
    from shard.admin.audit import End
    from shard.errors import ShardError
    from shard.postgres import schema
    from shard.vocabulary import CATALOG

    if not audit_log.is_on(cluster):
        return await work
    intent = audit_log.intent(
        principal=f"command:{_user()}",
        peer=socket.gethostname(),
        method=f"windrow {command}",
        org=org,
        request={name: value for name, value in request.items() if value not in (None, False)},
    )
    async with opened(CATALOG, cluster.catalog_dsn) as catalog:
        try:
            # Migrate the catalog, because the command may be of a newer release than the routers.
            await schema.migrate(catalog, cluster=None)
            await audit_log.begin(catalog, [intent])
        except BaseException:
            work.close()
            raise
        outcome = "CANCELLED"
        try:
            done = await work
            outcome = "OK"
        except typer.Exit as ended:
            # After Ctrl-C, some commands end by themselves at a safe point. For these commands, record the outcome
            # CANCELLED.
            if ended.exit_code != ExitCode.INTERRUPTED:
                outcome = f"FAILED {ExitCode(ended.exit_code).name}"
            raise
        except Exception as error:
            # Do not record the error's message, which may quote anything.
            outcome = f"FAILED {error.code.name if isinstance(error, CommandFailed) else type(error).__name__}"
            raise
        finally:
            try:
                await audit_log.end(catalog, [End(intent.id, outcome, {})])
            except ShardError as error:
                output.note(f"the audit log lacks the outcome of this command: {error}")
        return done


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In a container, the user may have a number but no name.
        return str(os.getuid())


def entry_row(entry: Entry) -> tuple[str, ...]:
    what = entry.method.rpartition("/")[2]
    return (
        output.time_text(_time(entry.at)),
        f"{entry.principal} ({entry.key_name})" if entry.key_name else entry.principal,
        entry.peer,
        f"{what} ({output.counted(entry.calls, 'call')})" if entry.calls > 1 else what,
        entry.org or "",
        entry.queue or "",
        _outcome(entry),
        "" if entry.request in (None, "{}") else str(entry.request),
    )


def _outcome(entry: Entry) -> str:
    if entry.outcome is None:
        return "not known"
    counts: dict[str, int] = json.loads(entry.counts or "{}")
    return ", ".join([entry.outcome, *(f"{many:,} {what.replace('_', ' ')}" for what, many in counts.items())])


def entry_json(entry: Entry) -> dict[str, object]:
    return {
        "id": entry.id,
        "at": _time(entry.at).isoformat(),
        "principal": entry.principal,
        "key_name": entry.key_name or None,
        "peer": entry.peer,
        "method": entry.method,
        "org": entry.org,
        "queue": entry.queue,
        "request": json.loads(entry.request or "{}"),
        "ended_at": None if entry.ended_at is None else _time(entry.ended_at).isoformat(),
        "outcome": entry.outcome,
        "counts": json.loads(entry.counts or "{}"),
        "calls": entry.calls,
    }


def _time(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / 1_000_000, UTC)
