"""Arguments and options that several commands share, so that each has one meaning and one help text."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cli import values
from cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from shard.vocabulary import OrgId

# The router's default (router/settings.py), repeated here because importing that module takes 0.2 s.
ADDRESS_DEFAULT = "127.0.0.1:7419"
TIMEOUT_DEFAULT = timedelta(seconds=10)


def _address(context: typer.Context, option: typer.CallbackParam, value: str) -> str:
    """Returns the address that the user gave, or else the address of the profile."""
    from cli import profiles

    # Use the name of this option, because `windrow health` has another name for it.
    source = context.get_parameter_source(option.name or "")
    return profiles.address(value, is_given=source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"))


Address: TypeAlias = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="WINDROW_ADDRESS",
        metavar="HOST:PORT",
        callback=_address,
        help="The router to talk to; grpcs://HOST:PORT: by TLS.",
    ),
]
Timeout: TypeAlias = Annotated[
    timedelta,
    typer.Option(
        "--timeout",
        parser=values.timeout,
        metavar="DURATION",
        show_default="10s",
        help="How long one call may take.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for scripts.")]
Org: TypeAlias = Annotated[str, typer.Argument(metavar="ORG", help="The tenant.", show_default=False)]
Queue: TypeAlias = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)]
Ids: TypeAlias = Annotated[list[str], typer.Argument(metavar="ID", help="Job ids; - reads them from standard input.")]
Leases: TypeAlias = Annotated[
    list[str],
    typer.Argument(metavar="LEASE", help="Leases that `dequeue` printed; - reads them from standard input."),
]
Retry: TypeAlias = Annotated[
    values.Retry | None,
    typer.Option(
        "--retry",
        parser=values.retry,
        metavar="POLICY",
        show_default=False,
        help="Delay before a retry: 10s (fixed), 1s..1h (doubling), or 1s..1h,x3,~0.2 (tripling, ±20 %).",
    ),
]
MaxAttempts: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--max-attempts", metavar="N", min=1, max=1000, show_default=False, help="Attempts before a job is dead."
    ),
]
Group: TypeAlias = Annotated[
    str,
    typer.Option(
        "--group",
        metavar="KEY",
        show_default=False,
        help="Run the jobs of the queue with this key one after another, or as many at a time as the queue allows.",
    ),
]
GroupConcurrency: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--group-concurrency",
        metavar="N",
        min=1,
        max=1000,
        show_default=False,
        help="How many jobs of one group run at a time.",
    ),
]
Ageing: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--ageing",
        parser=values.ageing,
        metavar="DURATION",
        show_default=False,
        help="A ready job of priority p goes to priority 1 after p - 1 times this: 1s to 7d.",
    ),
]
QuarantineAfter: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--quarantine-after",
        min=1,
        max=1000,
        metavar="N",
        show_default=False,
        help="Quarantine a kind after so many crashes.",
    ),
]
Retention: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--retention",
        parser=values.retention,
        metavar="DURATION",
        show_default=False,
        help="How long finished jobs are kept: none, a number of days (14d, at most 3650d), or 7y.",
    ),
]
Config: TypeAlias = Annotated[
    Path,
    typer.Option("--config", envvar="WINDROW_CONFIG", metavar="FILE", show_default=False, help="The cluster file."),
]
Listen: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        show_default="the cluster file's",
        help="The address that the routers listen on.",
    ),
]
PayloadFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", show_default=False, help="Read the payload from a file."),
]
Delay: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        "--delay", parser=values.duration, metavar="DURATION", show_default=False, help="Run after this time."
    ),
]
RunAt: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--run-at", parser=values.moment, metavar="TIME", show_default=False, help="Run at TIME."),
]
Priority: TypeAlias = Annotated[
    int | None, typer.Option("--priority", metavar="1-9", min=1, max=9, help="1 runs first, 9 last.")
]
Attributes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--attribute",
        metavar="KEY=VALUE",
        show_default=False,
        help="A label, readable without the payload; may be repeated.",
    ),
]
Kind: TypeAlias = Annotated[
    str, typer.Option("--kind", metavar="KIND", show_default=False, help="Only jobs of this kind.")
]
Where: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="KEY=VALUE",
        show_default=False,
        help="Only jobs with this attribute; may be repeated.",
    ),
]
MadeAfter: TypeAlias = Annotated[
    datetime | None,
    typer.Option(
        "--made-after",
        parser=values.past_moment,
        metavar="TIME",
        show_default=False,
        help="Only jobs made at or after TIME.",
    ),
]
MadeBefore: TypeAlias = Annotated[
    datetime | None,
    typer.Option(
        "--made-before",
        parser=values.past_moment,
        metavar="TIME",
        show_default=False,
        help="Only jobs made before TIME.",
    ),
]
DiedAfter: TypeAlias = Annotated[
    datetime | None,
    typer.Option(
        "--died-after",
        parser=values.past_moment,
        metavar="TIME",
        show_default=False,
        help="Only dead jobs that died at or after TIME.",
    ),
]
DiedBefore: TypeAlias = Annotated[
    datetime | None,
    typer.Option(
        "--died-before",
        parser=values.past_moment,
        metavar="TIME",
        show_default=False,
        help="Only dead jobs that died before TIME.",
    ),
]
NotKilled: TypeAlias = Annotated[
    bool, typer.Option("--not-killed", help="Only dead jobs whose last attempt did not fail permanently.")
]
Limit: TypeAlias = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, show_default="all", help="Change at most N jobs.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Change them at once, without counting and asking.")]


def org_id(text: str) -> OrgId:
    """Returns the text as an org id. Raises CommandFailed if the contract's rules do not allow this id."""
    from router.codec.validate import violations_of
    from shard.vocabulary import OrgId
    from windrow.v1 import admin_pb2

    try:
        violations = violations_of(admin_pb2.ListQueuesRequest(org=text))
    except UnicodeEncodeError:
        raise CommandFailed(f"org {text!r}: is not UTF-8", ExitCode.USAGE) from None
    for violation in violations:
        raise CommandFailed(f"org {text!r}: {violation.description}", ExitCode.USAGE)
    return OrgId(text)
