"""`windrow orgs`: sets the retention of an org's history, puts the org under legal hold, or erases it.

These commands read the cluster file and connect to the catalog and to all shards, because an org's history may be on
several shards. The list of all orgs is in cli/org_figures.py.
"""

from __future__ import annotations

import json
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, org_figures, output, values
from cli.audit import recorded
from cli.exits import CommandFailed, ExitCode
from cli.input_file import opened
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from archiver.orgs import Changed, Receipt
    from shard.history.org_policies import Policy
    from shard.placement.cluster_file import Cluster
    from shard.vocabulary import Micros, OrgId

_PLACES = ("live", "dead", "finished", "cold", "dedup_keys", "past_ids")

app = App(help="Lists all orgs; sets the retention of an org's history, puts it under legal hold, or erases it.")


@app.command()
def policies(config: options.Config, as_json: options.Json = False) -> None:
    """Lists the orgs that have a retention or a legal hold of their own."""
    from archiver import orgs

    found = databases.asked(orgs.read(databases.read(config)))
    if as_json:
        output.say_json(map(_json, found))
    elif not found:
        output.note("no org has a policy: finished jobs are kept for 30d, or for the retention of their queue")
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
    default: Annotated[bool, typer.Option("--default", help="Go back to the default retention, 30d.")] = False,
    past: Annotated[
        bool, typer.Option("--past", help="Apply the current settings also to jobs that have finished already.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Sets the retention of an org's finished jobs, for queues without a retention of their own.

    It applies to jobs that finish from now on. With --past it applies also to finished jobs, each by the current
    setting of its queue. Exit codes: 3 if a shard cannot be reached (it gets the change before anything is dropped
    there); 5 if a shard has 32 other retentions, or if an archiver is running and does not end.
    """
    from archiver import orgs

    if retention is not None and default:
        raise CommandFailed("give either --retention or --default, not both", ExitCode.USAGE)
    if not (past or default or retention is not None):
        raise CommandFailed("give --retention DURATION, --default or --past", ExitCode.USAGE)
    name = options.org_id(org)
    if default or retention is not None:
        _change(config, "orgs keep", name, lambda cluster: orgs.keep(cluster, name, days=retention), as_json=as_json)
    if past:
        _apply_to_past(config, name, as_json=as_json)


@app.command()
def hold(
    org: options.Org,
    config: options.Config,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", show_default=False, help="The reason, stored with the hold.")
    ],
    as_json: options.Json = False,
) -> None:
    """Puts an org under legal hold: its history is not dropped, and the org cannot be erased.

    Jobs run as before. When a day's retention ends, the held org's jobs are set aside and the other orgs' jobs are
    dropped. Exit codes: 3 if a shard cannot be reached, where a drop may be under way; 5 if the org is held already.
    """
    from archiver import orgs
    from shard.history import org_policies

    if not reason.strip() or len(reason) > 500:
        raise CommandFailed(f"--reason {reason!r}: must be a text of 1 to 500 characters", ExitCode.USAGE)
    name = options.org_id(org)
    _change(
        config,
        "orgs hold",
        name,
        lambda cluster: orgs.change(cluster, lambda catalog: org_policies.hold(catalog, name, reason=reason)),
        as_json=as_json,
    )


@app.command()
def release(org: options.Org, config: options.Config, as_json: options.Json = False) -> None:
    """Ends an org's legal hold: the archiver's next passes drop jobs whose retention has ended.

    Exit codes: 3 if a shard cannot be reached (it gets the change before anything is dropped there); 4 if the org is
    not held.
    """
    from archiver import orgs
    from shard.history import org_policies

    name = options.org_id(org)
    _change(
        config,
        "orgs release",
        name,
        lambda cluster: orgs.change(cluster, lambda catalog: org_policies.release(catalog, name)),
        as_json=as_json,
        done="released; ",
    )


@app.command()
def erase(
    org: options.Org,
    config: options.Config,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="FILE", show_default=False, help="Write a receipt to this file, as JSON."),
    ] = None,
    erasure_id: Annotated[
        uuid.UUID | None,
        typer.Option(
            "--id",
            metavar="ID",
            show_default=False,
            help="The id of an interrupted erasure: the receipt then has what that had erased, too.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Erases an org: all its jobs in every state on every shard, and all other records of them.

    The org ceases to exist at once; a later job with its name creates a new org. Repeat an interrupted command: the
    archiver's passes, and erasures of other orgs, erase what is left in the databases, but not in exports. If exports
    are in a directory, run the command on the archiver's machine. Exit codes: 3 if a shard or the exports cannot be
    reached, or if the org is erased but the receipt cannot be written (it is printed instead); 4 if no shard knows the
    org; 5 if it is under legal hold, or is being moved between shards.
    """
    from archiver import orgs

    name, cluster = options.org_id(org), databases.read(config)
    if not yes:
        _confirm(org)
    if receipt is not None:
        # Open the file for the receipt now, so that a wrong path is reported before anything is erased.
        opened(receipt, lambda: receipt.open("a").close(), hint="--receipt")
    own_id = str(erasure_id or uuid.uuid4())
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        output.note(text)

    work = orgs.erase(cluster, name, say=say, erasure_id=own_id)
    try:
        done = databases.asked(recorded(cluster, "orgs erase", work, org=name))
    except (CommandFailed, KeyboardInterrupt) as error:
        if said or not isinstance(error, CommandFailed) or error.code is ExitCode.UNAVAILABLE:
            output.note(f"repeat the command with --id {own_id}: the receipt then has what is erased already")
        raise
    document = _receipt_json(done)
    if receipt is not None:
        try:
            receipt.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            output.say_json([document])
            why = f"{str(receipt)!r}: {error.strerror}: the receipt is on standard output instead"
            raise CommandFailed(why, ExitCode.UNAVAILABLE) from error
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
        output.say(output.visible(f"{file.file}: rewritten without {output.counted(file.rows, 'job')}"))


def _confirm(org: str) -> None:
    if not sys.stdin.isatty():
        raise CommandFailed(f"everything of org {org!r} would be erased for ever: confirm with --yes", ExitCode.USAGE)
    if typer.prompt(f"Everything of org {org!r} will be erased for ever. Type its name to continue") != org:
        raise CommandFailed("that is not its name; nothing was erased", ExitCode.REFUSED)


def _change(
    config: Path,
    command: str,
    org: OrgId,
    change: Callable[[Cluster], Coroutine[object, object, Changed]],
    *,
    as_json: bool,
    done: str = "",
) -> None:
    """Changes an org's policy, and prints what was done and the new policy."""
    cluster = databases.read(config)
    policy, behind, may_have_queues = databases.asked(recorded(cluster, command, change(cluster), org=org))
    if as_json:
        output.say_json([_json(policy)])
    else:
        output.say(output.visible(f"org {policy.org}: {done}{_terms(policy)}"))
    if not may_have_queues:
        output.note(
            f"no shard has a queue of org {org!r} (is the name right?); the policy applies from its first job on"
        )
    if behind:
        raise CommandFailed(
            "these shards do not have the change yet; they get it before an archiver works there again: "
            + ", ".join(behind),
            ExitCode.UNAVAILABLE,
            particulars=[str(error) for error in behind.values()],
        )


def _apply_to_past(config: Path, org: OrgId, *, as_json: bool) -> None:
    from archiver import orgs

    cluster = databases.read(config)
    work = orgs.apply_to_past(cluster, org, say=output.note)
    jobs = databases.asked(recorded(cluster, "orgs keep --past", work, org=org))
    if as_json:
        output.say_json([{"org": org, "jobs_changed": jobs}])
    else:
        output.say(output.visible(f"org {org}: changed the retention of {output.counted(jobs, 'finished job')}"))


def _terms(policy: Policy) -> str:
    kept_for = "30d" if policy.retention is None else values.retention_text(policy.retention)
    held = (
        f"; under legal hold since {output.time_text(_time(policy.held_since))}: {policy.held_for}"
        if policy.held_since is not None
        else ""
    )
    return f"finished jobs are kept for {kept_for}, except in queues with another retention{held}"


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


org_figures.add_to(app)
