"""`windrow archive`: finds jobs in exported files, and verifies these files.

It reads the files at the location that `export` in the table [archiver] of the cluster file names. It needs no router
and no database.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import databases, options, output, values
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from archiver.export import Checked
    from archiver.object_store import Files

app = App(help="Finds exported jobs and verifies exported files.")
Shard = Annotated[
    str | None, typer.Option("--shard", metavar="SHARD", show_default="all", help="Only files of this shard.")
]


class State(StrEnum):
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"


@app.command("list")
def list_jobs(
    org: options.Org,
    config: options.Config,
    queue: Annotated[
        str, typer.Option("--queue", metavar="QUEUE", show_default=False, help="Only jobs of this queue.")
    ] = "",
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", show_default=False, help="Only jobs of this kind.")
    ] = "",
    states: Annotated[
        list[State] | None,
        typer.Option("--state", metavar="STATE", show_default="both", help="succeeded or cancelled."),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", show_default=False, help="Only the job with this id; may be repeated."),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            "--since",
            parser=values.past_moment,
            metavar="TIME",
            show_default=False,
            help="Only jobs that finished at or after TIME.",
        ),
    ] = None,
    until: Annotated[
        datetime | None,
        typer.Option(
            "--until",
            parser=values.past_moment,
            metavar="TIME",
            show_default=False,
            help="Only jobs that finished before TIME.",
        ),
    ] = None,
    shard: Shard = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Print at most N jobs.")] = 50,
    payload: Annotated[bool, typer.Option("--payload", help="Include payloads and results (with --json).")] = False,
    as_json: options.Json = False,
) -> None:
    """Lists an org's exported jobs, latest day first.

    Reads every file that may contain a matching job, so it is slower than `jobs list` and `jobs get`, which read the
    tables. --id, --since, --until and --shard reduce the files to read. Exit code 1: a file is damaged; 3: the export
    location does not answer.
    """
    from archiver.export_search import ExportFilter, find
    from shard.vocabulary import JobId, OrgId, ShardName

    wanted = ExportFilter(
        org=OrgId(org),
        shard=None if shard is None else ShardName(shard),
        queue=queue,
        kind=kind,
        states=[state.value for state in states or ()],
        ids=[JobId(name) for name in values.job_ids(ids or ())],
        since=since,
        until=until,
        payloads=payload and as_json,
    )
    with _files(config) as files:
        found = find(files, wanted)
        shown = 0
        rows: list[tuple[str, ...]] = []
        for job in itertools.islice(found, limit):
            shown += 1
            if as_json:
                output.say_json([_job_json(job, payloads=payload)])
            else:
                rows.append(_row(job))
        more = next(found, None) is not None
    if rows:
        columns = [Column(title="id"), Column(title="state", coloured=True), Column(title="attempt", right=True)]
        titles = ("finished", "queue", "kind", "shard")
        output.table([*columns, *(Column(title=title) for title in titles), Column(title="reason", detail=True)], rows)
    elif not shown and not as_json:
        output.note(f"no such jobs of org {org!r} were exported")
    if more:
        output.note("there are more: raise --limit, or give --since or --until")


@app.command()
def verify(config: options.Config, shard: Shard = None, as_json: options.Json = False) -> None:
    """Reads all exported files and compares them with their manifests.

    Compares sizes, SHA-256 checksums and row counts. Exit code 1: a file is damaged, missing, or in no manifest; 3: the
    export location does not answer.
    """
    from archiver.export import check_all
    from shard.vocabulary import ShardName

    checked: list[Checked] = []
    with _files(config) as files, output.counting("files") as progress:
        task = None if progress is None else progress.add_task("", total=None, count=0)
        for one in check_all(files, shard=None if shard is None else ShardName(shard)):
            checked.append(one)
            if as_json:
                output.say_json([_checked_json(one)])
            if progress is not None and task is not None:
                progress.update(task, count=len(checked))
    wrong = [one for one in checked if one.trouble]
    if not as_json:
        sound = [one.manifest for one in checked if one.manifest is not None and not one.trouble]
        rows, size = sum(one.rows for one in sound), sum(one.bytes for one in sound)
        output.say(f"{output.counted(len(sound), 'file')} verified: {output.counted(rows, 'job')}, {_size(size)}")
    for one in wrong:
        output.note(one.trouble)
    if wrong:
        raise typer.Exit(ExitCode.NO)


@contextmanager
def _files(config: Path) -> Generator[Files]:
    from archiver.errors import ExportFailed, FilesFailed, NotInstalled
    from archiver.settings import settings_of

    cluster = databases.read(config)
    place = settings_of(cluster).export
    if place is None:
        raise CommandFailed(f"{cluster.source}: [archiver] sets no export, so nothing is exported", ExitCode.USAGE)
    try:
        try:
            from archiver.object_store import Files
        except ModuleNotFoundError as error:
            raise NotInstalled(error.name) from error
        yield Files(place)
    except FilesFailed as error:
        raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error
    except ExportFailed as error:
        raise CommandFailed(str(error), ExitCode.NO) from error


def _size(size: int) -> str:
    from shard.formatting import size_text

    return size_text(size)


def _row(job: Mapping[str, Any]) -> tuple[str, ...]:
    attempts = f"{job['attempt']}/{job['max_attempts']}" if job["max_attempts"] else str(job["attempt"])
    finished = output.time_text(job["finished_at"].astimezone(UTC))
    reason = next(iter((job["reason"] or "").splitlines()), "")
    return (job["id"], job["state"], attempts, finished, job["queue"], job["kind"], job["shard"], reason)


def _job_json(job: Mapping[str, Any], *, payloads: bool) -> dict[str, object]:
    from cli.messages import job_json

    # The retry policy is not among the documented keys.
    known = {name: value for name, value in job.items() if name != "retry"}
    return {**job_json(known, payloads=payloads), "retention_days": job["retention"], "day": job["day"]}


def _checked_json(one: Checked) -> dict[str, object]:
    manifest = one.manifest
    return {
        "file": one.file,
        "shard": manifest and manifest.shard,
        "retention_days": manifest and manifest.retention,
        "day": manifest and manifest.day,
        "jobs": manifest and manifest.rows,
        "bytes": manifest and manifest.bytes,
        "sha256": manifest and manifest.sha256,
        "trouble": one.trouble or None,
    }
