"""`windrow limits`: limits on how much orgs may enqueue, how many of their jobs may start in an interval, and how many
may be leased at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cli import options, output, values
from cli.exits import CommandFailed, ExitCode, RequestRefused
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from windrow.v1 import limits_pb2

app = App(help="Limits how much orgs may enqueue, how many of their jobs may start, and how many run at a time.")

# Measures that count what exists at one moment, each with its name for messages. A limit of such a measure has no
# interval.
_AT_A_TIME = {
    "in_flight": "jobs in flight",
    "backlog": "jobs of backlog",
    "backlog_bytes": "bytes of backlog",
}
_GIVE = "give either --jobs{0}, --bytes{0}, --starts{0}, --in-flight{0}, --backlog{0} or --backlog-bytes{0}"
_OrgOption: TypeAlias = Annotated[
    str | None, typer.Option("--org", metavar="ORG", show_default=False, help="The org that is limited.")
]
_EveryOrg: TypeAlias = Annotated[
    bool, typer.Option("--every-org", help="The default for each org that has no such limit of its own.")
]
_QueueOption: TypeAlias = Annotated[
    str, typer.Option("--queue", metavar="QUEUE", show_default="all queues together", help="Only this queue.")
]


@app.command("set")
def set_limit(
    org: _OrgOption = None,
    every_org: _EveryOrg = False,
    queue: _QueueOption = "",
    jobs: Annotated[
        int | None, typer.Option("--jobs", metavar="N", show_default=False, help="So many new jobs per interval.")
    ] = None,
    byte_count: Annotated[
        int | None,
        typer.Option(
            "--bytes", metavar="N", show_default=False, help="So many bytes of payloads and attributes per interval."
        ),
    ] = None,
    starts: Annotated[
        int | None, typer.Option("--starts", metavar="N", show_default=False, help="So many leased jobs per interval.")
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option("--in-flight", metavar="N", show_default=False, help="So many leased jobs at a time."),
    ] = None,
    backlog: Annotated[
        int | None, typer.Option("--backlog", metavar="N", show_default=False, help="So many jobs that have not ended.")
    ] = None,
    backlog_bytes: Annotated[
        int | None,
        typer.Option("--backlog-bytes", metavar="N", show_default=False, help="So many bytes of such jobs."),
    ] = None,
    per: Annotated[
        timedelta | None,
        typer.Option(
            "--per", parser=values.duration, metavar="DURATION", show_default="1s", help="The interval: 1s to 24h."
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Sets a limit, or changes it. It is in force on every router within 2 s.

    After a pause an org may enqueue the whole amount at once, and then goes on at its rate: 1,000 jobs per 10s allow
    1,000 at once, 100 jobs per 1s only 100. Jobs above the limit are refused with the time to wait.

    A limit of starts, or of jobs in flight, refuses nothing: ready jobs wait until it has room. A limit of the backlog
    refuses jobs while too many have not ended. Limits of jobs in flight and of the backlog have no interval.
    """
    from cli.calls import connect
    from windrow.v1 import cluster_pb2

    of_org = _org(org, every_org=every_org)
    amounts = {"jobs": jobs, "bytes": byte_count, "starts": starts}
    amounts |= {"in_flight": in_flight, "backlog": backlog, "backlog_bytes": backlog_bytes}
    given = [(measure, amount) for measure, amount in amounts.items() if amount is not None]
    if len(given) != 1:
        raise CommandFailed(_GIVE.format(" N"), ExitCode.USAGE)
    ((measure, amount),) = given
    if measure in _AT_A_TIME and per is not None:
        raise CommandFailed(f"--per: a limit of {_AT_A_TIME[measure]} has no interval", ExitCode.USAGE)
    request = cluster_pb2.SetLimitRequest(org=of_org, queue=queue, measure=_number(measure))
    try:
        request.amount = amount
    except ValueError:
        raise CommandFailed(f"{_option(measure)} {amount}: is too large", ExitCode.USAGE) from None
    if measure not in _AT_A_TIME:
        request.interval.FromTimedelta(per or timedelta(seconds=1))
    try:
        with connect(address, timeout) as router:
            limit = router.call(router.cluster.SetLimit, request).limit
    except RequestRefused as error:
        # The router's message says --amount. Name the option that the user gave instead.
        particulars = [line.replace("--amount", _option(measure), 1) for line in error.particulars]
        raise RequestRefused(error.violations, particulars=particulars) from error
    if as_json:
        output.say_json([_json(limit)])
    else:
        output.say(output.visible(f"{_whose(limit)}: {_terms(limit)}"))


@app.command()
def clear(
    org: _OrgOption = None,
    every_org: _EveryOrg = False,
    queue: _QueueOption = "",
    jobs: Annotated[bool, typer.Option("--jobs", help="The limit of jobs.")] = False,
    of_bytes: Annotated[bool, typer.Option("--bytes", help="The limit of bytes.")] = False,
    starts: Annotated[bool, typer.Option("--starts", help="The limit of starts.")] = False,
    in_flight: Annotated[bool, typer.Option("--in-flight", help="The limit of jobs in flight.")] = False,
    backlog: Annotated[bool, typer.Option("--backlog", help="The limit of jobs that have not ended.")] = False,
    backlog_bytes: Annotated[bool, typer.Option("--backlog-bytes", help="The limit of bytes of such jobs.")] = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Removes a limit. An org without a limit of its own has the default, if there is one.

    Exit code 4: there is no such limit.
    """
    from cli.calls import connect
    from windrow.v1 import cluster_pb2

    of_org = _org(org, every_org=every_org)
    named = {"jobs": jobs, "bytes": of_bytes, "starts": starts}
    named |= {"in_flight": in_flight, "backlog": backlog, "backlog_bytes": backlog_bytes}
    given = [measure for measure, is_given in named.items() if is_given]
    if len(given) != 1:
        raise CommandFailed(_GIVE.format(""), ExitCode.USAGE)
    request = cluster_pb2.ClearLimitRequest(org=of_org, queue=queue, measure=_number(given[0]))
    with connect(address, timeout) as router:
        cleared = router.call(router.cluster.ClearLimit, request).cleared
    if not cleared:
        raise CommandFailed("there is no such limit; `windrow limits list` shows all", ExitCode.NOT_FOUND)
    output.note("the limit is removed")


@app.command("list")
def list_limits(
    org: Annotated[
        str | None,
        typer.Option("--org", metavar="ORG", show_default=False, help="Only the limits that count for this org."),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists the limits: the defaults first, then the limits of orgs, by the orgs' names.

    With --org, lists the limits that count for this org, defaults included; the scope read is enough for that.
    """
    from cli.calls import connect
    from windrow.v1 import admin_pb2, cluster_pb2

    found: Sequence[limits_pb2.Limit]
    with connect(address, timeout) as router:
        if org is None:
            found = router.call(router.cluster.ListAllLimits, cluster_pb2.ListAllLimitsRequest()).limits
        else:
            found = router.call(router.admin.ListLimits, admin_pb2.ListLimitsRequest(org=org)).limits
    if as_json:
        output.say_json(map(_json, found))
    elif not found:
        output.note("there is no limit: orgs may enqueue and start as much as their shards take")
    else:
        columns = [
            Column(title="org"),
            Column(title="queue"),
            Column(title="limit", right=True),
            Column(title="per", right=True),
        ]
        output.table(columns, [_row(limit) for limit in found])


def _option(measure: str) -> str:
    return f"--{measure.replace('_', '-')}"


def _org(org: str | None, *, every_org: bool) -> str:
    """Returns the org for the request. Empty: the default limit of every org."""
    if (org is None) != every_org:
        raise CommandFailed("give either --org ORG or --every-org", ExitCode.USAGE)
    if org == "":
        raise CommandFailed("--org: is empty; --every-org sets the default", ExitCode.USAGE)
    return org or ""


def _measure(limit: limits_pb2.Limit) -> str:
    """Returns the name of what the limit counts, such as `jobs` or `in_flight`."""
    from windrow.v1 import limits_pb2

    return limits_pb2.LimitMeasure.Name(limit.measure).removeprefix("LIMIT_MEASURE_").lower()


def _number(measure: str) -> limits_pb2.LimitMeasure.ValueType:
    from windrow.v1 import limits_pb2

    return limits_pb2.LimitMeasure.Value(f"LIMIT_MEASURE_{measure.upper()}")


def _terms(limit: limits_pb2.Limit) -> str:
    interval = _interval(limit)
    return _amount(limit) + (f" per {values.exact(interval)}" if interval is not None else "")


def _amount(limit: limits_pb2.Limit) -> str:
    measure = _measure(limit)
    return f"{limit.amount:,} {_AT_A_TIME.get(measure, measure)}"


def _interval(limit: limits_pb2.Limit) -> timedelta | None:
    return limit.interval.ToTimedelta() if limit.HasField("interval") else None


def _whose(limit: limits_pb2.Limit) -> str:
    queue = f", queue {limit.queue}" if limit.queue else ""
    return (f"org {limit.org}" if limit.org else "each org") + queue


def _row(limit: limits_pb2.Limit) -> Sequence[str]:
    return (
        limit.org or "each org",
        limit.queue or "all together",
        _amount(limit),
        "" if (interval := _interval(limit)) is None else values.exact(interval),
    )


def _json(limit: limits_pb2.Limit) -> dict[str, object]:
    return {
        "org": limit.org or None,
        "queue": limit.queue or None,
        "measure": _measure(limit),
        "amount": limit.amount,
        "interval_s": None if (interval := _interval(limit)) is None else interval.total_seconds(),
    }
