"""`windrow orgs list`: the orgs of all shards with their figures, as a router counts them."""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options, output, values
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from collections.abc import Iterable

    from windrow.v1 import cluster_pb2

_PAGE_MAX = 1000
SORT_HELP = "Largest first; backlog is ready and scheduled, in-flight is leased, rate is in and out."
_COUNTS = ("scheduled", "ready", "leased", "dead")


class Sort(enum.StrEnum):
    BACKLOG = "backlog"
    OLDEST = "oldest"
    DEAD = "dead"
    IN_FLIGHT = "in-flight"
    RATE = "rate"
    NAME = "name"


def add_to(app: App) -> None:
    app.command("list")(list_orgs)


def list_orgs(
    search: Annotated[
        str,
        typer.Option("--search", metavar="TEXT", show_default=False, help="Only orgs whose names contain TEXT."),
    ] = "",
    sort: Annotated[Sort, typer.Option("--sort", help=SORT_HELP)] = Sort.BACKLOG,
    shard: Annotated[
        str,
        typer.Option(
            "--shard", metavar="NAME", show_default=False, help="Only the orgs on this shard, with its figures alone."
        ),
    ] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most N orgs.")] = 100,
    max_age: Annotated[
        timedelta,
        typer.Option(
            "--max-age",
            parser=values.duration,
            metavar="DURATION",
            show_default="1m",
            help="Count again if the last count is older.",
        ),
    ] = timedelta(minutes=1),
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists the orgs of all shards: their jobs, since when the oldest is ready, and how fast jobs come and end.

    A count reads all unfinished jobs once: about a second for a million of them. Exit code 3: a shard did not answer;
    its orgs and jobs are missing.
    """
    from cli.calls import connect
    from windrow.v1 import cluster_pb2

    request = cluster_pb2.ListOrgsRequest(
        search=search,
        sort=sort_value(sort),
        shard=shard,
    )
    request.max_age.FromTimedelta(max_age)
    orgs: list[cluster_pb2.OrgFigures] = []
    age, away = timedelta(), set[str]()
    with connect(address, timeout) as router:
        while True:
            request.page_size = min(_PAGE_MAX, limit - len(orgs))
            answer = router.call(router.cluster.ListOrgs, request)
            orgs += answer.orgs
            age, away = max(age, answer.age.ToTimedelta()), away.union(answer.unavailable_shards)
            request.page_token = answer.next_page_token
            if not request.page_token or len(orgs) >= limit:
                break
    # A router may send more orgs than it was asked for.
    more = bool(request.page_token) or len(orgs) > limit
    del orgs[limit:]
    if as_json:
        output.say_json(as_document(figures, age) for figures in orgs)
    else:
        _print(orgs)
        if orgs:
            over = rates_over(orgs)
            rates = "" if over is None else f", and {values.rough(over)} before that"
            output.note(
                f"counted {values.rough(age)} ago{rates}{'; there are more orgs: raise --limit' if more else ''}"
            )
        else:
            output.note("no org matches" if search else "there are no orgs yet")
    output.refuse_away(sorted(away))


def _print(orgs: list[cluster_pb2.OrgFigures]) -> None:
    if orgs:
        output.table(columns(), rows(orgs))


def sort_value(sort: Sort) -> cluster_pb2.OrgSort.ValueType:
    from windrow.v1 import cluster_pb2

    return cluster_pb2.OrgSort.Value(f"ORG_SORT_{sort.name}")


def columns() -> list[Column]:
    return [
        Column(title="org"),
        *(Column(title=count, right=True) for count in _COUNTS),
        Column(title="oldest ready", right=True),
        Column(title="in/s", right=True),
        Column(title="out/s", right=True),
        Column(title="shard"),
    ]


def rows(orgs: Iterable[cluster_pb2.OrgFigures]) -> list[tuple[str, ...]]:
    return [
        (
            figures.org,
            *(f"{getattr(figures, count):,}" for count in _COUNTS),
            values.rough(figures.oldest_ready_age.ToTimedelta()) if figures.HasField("oldest_ready_age") else "",
            _rate(figures, figures.enqueued_per_s),
            _rate(figures, figures.ended_per_s),
            ", ".join(figures.shards),
        )
        for figures in orgs
    ]


def rates_over(orgs: Iterable[cluster_pb2.OrgFigures]) -> timedelta | None:
    """Returns the length of the time over which the rates were measured. If it differs between orgs, because shards
    were counted at different times, returns the longest."""
    return max((one.rates_over.ToTimedelta() for one in orgs if one.HasField("rates_over")), default=None)


def _rate(figures: cluster_pb2.OrgFigures, per_s: float) -> str:
    if not figures.HasField("rates_over"):
        return ""
    return f"{per_s:,.0f}" if per_s >= 10 or not per_s else f"{per_s:.2g}"


def as_document(figures: cluster_pb2.OrgFigures, age: timedelta) -> dict[str, object]:
    known = figures.HasField("rates_over")
    return {
        "org": figures.org,
        **{count: getattr(figures, count) for count in _COUNTS},
        "oldest_ready_age_s": figures.oldest_ready_age.ToTimedelta().total_seconds()
        if figures.HasField("oldest_ready_age")
        else None,
        "enqueued_per_s": figures.enqueued_per_s if known else None,
        "ended_per_s": figures.ended_per_s if known else None,
        "rates_over_s": figures.rates_over.ToTimedelta().total_seconds() if known else None,
        "shards": list(figures.shards),
        "counted_s_ago": age.total_seconds(),
    }
