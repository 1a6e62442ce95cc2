"""`windrow orgs`: what becomes of an org's history. How long it is kept, legal hold, and erasure.

They go by the cluster file, to the catalog and all shards: an org's history may lie on several.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output, values
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from archiver.orgs import Receipt
    from shard.database import Database
    from shard.policies import Policy
    from shard.vocabulary import Micros, OrgId

_PLACES = ("live", "dead", "finished", "cold", "dedup_keys", "past_ids")

app = App(help="Say how long orgs' history is kept, hold it, and erase it.")


@app.command("list")
def list_orgs(config: options.Config, as_json: options.Json = False) -> None:
    """List the orgs that are told anything about their history."""
    from archiver import orgs

    found = databases.asked(orgs.read(databases.read(config)))
    if as_json:
        output.say_json(map(_json, found))
    elif not found:
        output.note("no org is told anything: finished jobs are kept for 30d, or as their queues say")
    else:
        columns = [
            Column(title="org"),
            Column(title="finished kept", right=True),
            Column(title="held since"),
            Column(title="for"),
        ]
        output.table(
            columns,
            [
                (
                    one.org,
                    "" if one.retention is None else values.retention_text(one.retention),
                    "" if one.held_since is None else output.time_text(_time(one.held_since)),
                    one.held_for or "",
                )
                for one in found
            ],
        )


@app.command()
def keep(
    org: options.Org,
    config: options.Config,
    retention: options.Retention = None,
    default: Annotated[bool, typer.Option("--default", help="As long as without a word: 30d.")] = False,
    past: Annotated[
        bool, typer.Option("--past", help="Also what has finished already, by what its queues say now.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Say how long an org's finished jobs are kept, where their queues do not say.

    Those that finish from now on; with --past also those that have, as their queues say now. Exit codes: 3 if a shard
    cannot be reached, which will know before anything is dropped there; 5 if an archiver is at work and does not end.
    """
    from shard import policies

    if retention is not None and default:
        raise CommandFailed("say either --retention or --default", ExitCode.USAGE)
    if not (past or default or retention is not None):
        raise CommandFailed("say how long: --retention DURATION or --default; or --past", ExitCode.USAGE)
    name = options.org_id(org)
    if default or retention is not None:
        _change(config, lambda catalog: policies.keep(catalog, name, days=retention), as_json=as_json)
    if past:
        _apply_to_past(config, name, as_json=as_json)


@app.command()
def hold(
    org: options.Org,
    config: options.Config,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", show_default=False, help="Why, for whoever asks later.")
    ],
    as_json: options.Json = False,
) -> None:
    """Put an org under legal hold: nothing of its history is dropped, and it cannot be erased.

    Jobs run as before. Those whose time has come are set aside, while what others had beside them goes. Exit codes: 3
    if a shard cannot be reached, where a drop may be under way; 5 if the org is held already.
    """
    from shard import policies

    if not reason.strip() or len(reason) > 500:
        raise CommandFailed(f"--reason {reason!r}: must be a text of 1 to 500 characters", ExitCode.USAGE)
    name = options.org_id(org)
    _change(config, lambda catalog: policies.hold(catalog, name, reason=reason), as_json=as_json)


@app.command()
def release(org: options.Org, config: options.Config, as_json: options.Json = False) -> None:
    """End an org's legal hold: what has been kept for its time goes with the archiver's next passes.

    Exit codes: 3 if a shard cannot be reached, which will know in time; 4 if the org is not held.
    """
    from shard import policies

    name = options.org_id(org)
    _change(config, lambda catalog: policies.release(catalog, name), as_json=as_json)


@app.command()
def erase(
    org: options.Org,
    config: options.Config,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="FILE", show_default=False, help="Write the receipt there, as JSON."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Erase an org: all its jobs, whatever their state and wherever they are, and all that is remembered of them.

    The org is no more at once; a job of that name that comes later makes another. Interrupted, it goes on when it is
    called again, and with the archiver's passes. Exit codes: 3 if a shard cannot be reached; 4 if no shard knows the
    org; 5 if it is under legal hold, or moves between shards just now.
    """
    from archiver import orgs

    name, cluster = options.org_id(org), databases.read(config)
    if not yes:
        _confirm(org)
    done = databases.asked(orgs.erase(cluster, name, say=output.note))
    document = _receipt_json(done)
    if receipt is not None:
        receipt.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if as_json:
        output.say_json([document])
        return
    if not (done.files or any(done.shards.values())):
        raise CommandFailed(f"no shard knows an org {org!r}: there was nothing to erase", ExitCode.NOT_FOUND)
    columns = [Column(title="shard"), *(Column(title=place.replace("_", " "), right=True) for place in _PLACES)]
    output.table(
        columns,
        [
            (shard, *(f"{sum(getattr(one, place) for one in erasures):,}" for place in _PLACES))
            for shard, erasures in done.shards.items()
        ],
    )
    for file in done.files:
        output.say(output.visible(f"{file.file}: written anew without {output.counted(file.rows, 'job')}"))


def _confirm(org: str) -> None:
    if not sys.stdin.isatty():
        raise CommandFailed(
            f"all that org {org!r} has would be erased for ever: say --yes if that is meant", ExitCode.USAGE
        )
    if typer.prompt(f"All that org {org!r} has is erased for ever. Type its name to go on") != org:
        raise CommandFailed("that is not its name; nothing was erased", ExitCode.REFUSED)


def _change(config: Path, decide: Callable[[Database], Awaitable[Policy]], *, as_json: bool) -> None:
    from archiver import orgs

    policy, behind = databases.asked(orgs.change(databases.read(config), decide))
    if as_json:
        output.say_json([_json(policy)])
    else:
        output.say(output.visible(_sentence(policy)))
    if behind:
        raise CommandFailed(
            "these shards do not know of it yet; they will before an archiver works there again: " + ", ".join(behind),
            ExitCode.UNAVAILABLE,
            particulars=[str(error) for error in behind.values()],
        )


def _apply_to_past(config: Path, org: OrgId, *, as_json: bool) -> None:
    from archiver import orgs

    jobs = databases.asked(orgs.apply_to_past(databases.read(config), org, say=output.note))
    if as_json:
        output.say_json([{"org": org, "jobs_changed": jobs}])
    else:
        output.say(output.visible(f"org {org}: {output.counted(jobs, 'finished job')} kept for another time now"))


def _sentence(policy: Policy) -> str:
    kept = "30d" if policy.retention is None else values.retention_text(policy.retention)
    held = (
        f"; under legal hold since {output.time_text(_time(policy.held_since))}: {policy.held_for}"
        if policy.held_since is not None
        else ""
    )
    return f"org {policy.org}: finished jobs are kept for {kept}, but for queues that say otherwise{held}"


def _json(policy: Policy) -> dict[str, object]:
    return {
        "org": policy.org,
        "retention_days": policy.retention,
        "held_since": None if policy.held_since is None else _time(policy.held_since).isoformat(),
        "held_for": policy.held_for,
    }


def _receipt_json(receipt: Receipt) -> dict[str, object]:
    return {
        "org": receipt.org,
        "erasures": [
            {
                "shard": shard,
                "id": one.id,
                "begun_at": _time(one.begun_at).isoformat(),
                "ended_at": None if one.ended_at is None else _time(one.ended_at).isoformat(),
                **{place: getattr(one, place) for place in _PLACES},
            }
            for shard, erasures in receipt.shards.items()
            for one in erasures
        ],
        "files": [{"file": one.file, "jobs": one.rows} for one in receipt.files],
    }


def _time(micros: Micros) -> datetime:
    return datetime.fromtimestamp(micros / 1_000_000, UTC)
