"""`windrow health` and `windrow check`: whether a router answers, and whether the shards' job counts balance (I5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options, output, profiles, values
from cli.exits import CommandFailed, ExitCode
from cli.output import Column

if TYPE_CHECKING:
    from windrow.v1 import cluster_pb2

# Every state that an accepted job can have in the books. The books count blocked jobs as scheduled.
_STATES = ("scheduled", "ready", "leased", "succeeded", "dead", "cancelled", "archived", "expired")


def health(
    address: Annotated[
        str | None,
        typer.Argument(metavar="HOST:PORT", help="The router to ask, instead of --address.", show_default=False),
    ] = None,
    address_option: options.Address = options.ADDRESS_DEFAULT,
    timeout: Annotated[
        timedelta,
        typer.Option(
            "--timeout",
            parser=values.duration,
            metavar="DURATION",
            show_default="3s",
            help="How long to wait for the answer.",
        ),
    ] = timedelta(seconds=3),
    as_json: options.Json = False,
) -> None:
    """Asks a router whether it is healthy: exit code 0 if it is, else 1.

    Prints nothing if it is healthy.
    """
    from cli.calls import connect

    place = profiles.address(address, is_given=True) if address else address_option
    with connect(place, timeout) as router:
        try:
            serves, trouble = router.serves(), f"the router at {place} does not accept calls now"
        except CommandFailed as error:
            serves, trouble = False, str(error)
    if as_json:
        output.say_json([{"address": place, "healthy": serves}])
    if not serves:
        raise CommandFailed(trouble, ExitCode.NO)


@dataclass(slots=True, kw_only=True)
class _Books:
    """The result of one shard's check."""

    shard: str
    orgs: list[cluster_pb2.OrgBooks] = field(default_factory=list["cluster_pb2.OrgBooks"])
    workflow_faults: list[cluster_pb2.WorkflowFault] = field(default_factory=list["cluster_pb2.WorkflowFault"])
    # Why the shard did not answer. Empty if the shard answered.
    trouble: str = ""

    @property
    def unbalanced(self) -> list[cluster_pb2.OrgBooks]:
        return [org for org in self.orgs if not org.balanced]

    @property
    def suspect(self) -> list[cluster_pb2.OrgBooks]:
        return [org for org in self.orgs if org.stray or not org.balanced]

    @property
    def astray(self) -> list[cluster_pb2.OrgBooks]:
        """The orgs with stray jobs, which no router reads on this shard."""
        return [org for org in self.orgs if org.stray]


def check(
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="NAME", show_default="all", help="Check only this shard."),
    ] = None,
    every_org: Annotated[bool, typer.Option("--orgs", help="Show every org, not only those with problems.")] = False,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: Annotated[
        timedelta,
        typer.Option(
            "--timeout",
            parser=values.duration,
            metavar="DURATION",
            show_default="5m",
            help="How long one shard may take; it also counts its finished jobs.",
        ),
    ] = timedelta(minutes=5),
) -> None:
    """Checks that no job is lost and none is duplicated.

    For each org on each shard, the number of jobs accepted must equal the number found, and live jobs must be on the
    shard of their org. Reads one snapshot of each shard, so it is safe under load. Exit code 1: some counts differ, or
    there are stray jobs; 3: a shard did not answer.
    """
    from cli.calls import connect
    from windrow.v1 import cluster_pb2

    checked: list[_Books] = []
    with connect(address, timeout) as router:
        if shard is not None:
            names = [shard]
        else:
            listed = router.call(router.cluster.ListShards, cluster_pb2.ListShardsRequest())
            names = [found.name for found in listed.shards]
        for at, name in enumerate(names, 1):
            books = _Books(shard=name)
            checked.append(books)
            with output.working(f"checking shard {name} ({at} of {len(names)})") as status:
                try:
                    for part in router.stream(router.cluster.CheckShard, cluster_pb2.CheckShardRequest(shard=name)):
                        books.orgs += part.orgs
                        books.workflow_faults += part.workflow_faults
                        if status is not None:
                            status.update(f"checking shard {name}, orgs: {len(books.orgs):,}")
                except CommandFailed as error:
                    if error.code is not ExitCode.UNAVAILABLE:
                        raise
                    books.trouble = str(error)
            if as_json:
                output.say_json([_books_json(books, every_org=every_org)])
    if not as_json:
        _print_books(checked, every_org=every_org)
    for books in checked:
        if books.trouble:
            output.note(f"shard {books.shard} did not answer: {books.trouble}")
    for books in checked:
        if books.astray:
            jobs = output.counted(sum(org.stray for org in books.astray), "stray job")
            output.note(
                f"shard {books.shard} has {jobs}, whose orgs live on other shards: "
                f"`windrow shards recover {books.shard} --config FILE` moves them there"
            )
    for books in checked:
        for fault in books.workflow_faults:
            where = f"workflow {fault.workflow_id} of org {fault.org!r} on shard {books.shard}"
            output.note(f"{where}{f', node {fault.node}' if fault.node >= 0 else ''}: {fault.what}")
    if any(books.unbalanced or books.astray or books.workflow_faults for books in checked):
        raise typer.Exit(ExitCode.NO)
    if any(books.trouble for books in checked):
        raise typer.Exit(ExitCode.UNAVAILABLE)


def _print_books(checked: Sequence[_Books], *, every_org: bool) -> None:
    totals = [_sums(books.orgs) for books in checked]
    rows = [
        (
            books.shard,
            *("?" if books.trouble else f"{count:,}" for count in (len(books.orgs), *_accepted_found(sums))),
            _verdict(books),
        )
        for books, sums in zip(checked, totals, strict=True)
    ]
    if len(checked) > 1:
        together = [sum(sums[state] for sums in totals) for state in ("accepted", "found")]
        rows.append(("total", f"{sum(len(books.orgs) for books in checked):,}", *(f"{one:,}" for one in together), ""))
    output.table(
        [
            Column(title="shard"),
            *(Column(title=title, right=True) for title in ("orgs", "accepted", "found")),
            Column(title="books", coloured=True),
        ],
        rows,
    )
    counts = ", ".join(f"{sum(sums[state] for sums in totals):,} {state}" for state in _STATES)
    output.say(f"found: {counts}")
    shown = [(books.shard, org) for books in checked for org in (books.orgs if every_org else books.suspect)]
    if not shown:
        return
    output.say("")
    output.table(
        [
            Column(title="org"),
            Column(title="shard"),
            Column(title="accepted", right=True),
            Column(title="found", right=True),
            Column(title="books", coloured=True),
            Column(title="found are", detail=True),
        ],
        [
            (
                org.org,
                name,
                *(f"{count:,}" for count in _accepted_found(_sums([org]))),
                "balance" if org.balanced else _off(_sums([org])),
                ", ".join(f"{getattr(org, state):,} {state}" for state in _STATES if getattr(org, state))
                + (f"; {org.stray:,} stray: the org lives on {org.home_shard}" if org.stray else ""),
            )
            for name, org in shown
        ],
    )


def _sums(orgs: Sequence[cluster_pb2.OrgBooks]) -> dict[str, int]:
    sums = {state: sum(getattr(org, state) for org in orgs) for state in _STATES}
    return {"accepted": sum(org.accepted for org in orgs), "found": sum(sums.values()), **sums}


def _accepted_found(sums: dict[str, int]) -> tuple[int, int]:
    return sums["accepted"], sums["found"]


def _off(sums: dict[str, int]) -> str:
    lost = sums["accepted"] - sums["found"]
    return f"{lost:,} lost" if lost > 0 else f"{-lost:,} too many"


def _verdict(books: _Books) -> str:
    if books.trouble:
        return "no answer"
    if books.unbalanced:
        return f"{len(books.unbalanced)} orgs differ"
    return f"{len(books.astray)} orgs astray" if books.astray else "balance"


def _books_json(books: _Books, *, every_org: bool) -> dict[str, object]:
    document: dict[str, object] = {
        "shard": books.shard,
        "answered": not books.trouble,
        "balanced": None if books.trouble else not books.unbalanced,
        "orgs": len(books.orgs),
        **_sums(books.orgs),
        "unbalanced": [_org_json(org) for org in books.unbalanced],
        "workflow_faults": [
            {"org": fault.org, "workflow": fault.workflow_id, "node": fault.node, "what": fault.what}
            for fault in books.workflow_faults
        ],
        "stray": [{"org": org.org, "jobs": org.stray, "home_shard": org.home_shard} for org in books.astray],
    }
    if every_org:
        document["books"] = [_org_json(org) for org in books.orgs]
    return document


def _org_json(org: cluster_pb2.OrgBooks) -> dict[str, object]:
    return {"org": org.org, "balanced": org.balanced, **_sums([org])}
