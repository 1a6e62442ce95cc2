"""`windrow shards`: shows the shards as a router sees them. Other modules add commands to this group. Those commands do
not ask a router: they connect to the databases of a cluster file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from cli import clock, differences, moves, options, output, pins, recovery
from cli.exits import ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from windrow.v1 import cluster_pb2

app = App()


@app.callback(invoke_without_command=True, no_args_is_help=False)
def list_shards(
    context: typer.Context,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists the shards, their health, and the router's cluster file.

    Exit code 1: a shard that is not off has an error, such as a full disk or a DSN that cannot be used, or the router
    refuses the current cluster file.
    """
    if context.invoked_subcommand is not None:
        _refuse_lost_options(context)
        return
    from cli.calls import connect
    from windrow.v1 import cluster_pb2

    with connect(address, timeout) as router:
        found = router.call(router.cluster.ListShards, cluster_pb2.ListShardsRequest())
    file = found.cluster_file
    if as_json:
        output.say_json({**_shard_json(shard), "cluster_file": _file_json(file)} for shard in found.shards)
    else:
        # These figures have their own columns, which are shown only if a shard has such a figure. If they were text
        # after the counts of another column, the counts would not be aligned.
        fields = {"leaving": "leaving_slots", "pinned orgs": "pinned_orgs"}
        extra = {title: name for title, name in fields.items() if any(getattr(shard, name) for shard in found.shards)}
        columns = [
            Column(title="shard"),
            Column(title="slots", right=True),
            *(Column(title=title, right=True) for title in extra),
            Column(title="weight", right=True),
            Column(title="state", coloured=True),
            Column(title="health", coloured=True),
            Column(title="latency", right=True),
            Column(title="postgres"),
            Column(title="schema", right=True),
            Column(title="labels", detail=True),
            Column(title="error", detail=True),
        ]
        output.table(columns, [_shard_row(shard, extra.values()) for shard in found.shards])
        if file.digest:
            output.say(f"cluster file {file.digest}, in use since {output.time_text(file.used_since.ToDatetime())}")
        for key in file.needs_restart:
            output.note(f"{key} has changed in the file: restart the routers to apply it")
        if file.HasField("refusal"):
            output.note(
                f"the current cluster file is refused, and the previous one stays in use: {file.refusal.reason}"
            )
    if file.HasField("refusal") or any(shard.error and _health(shard) != "off" for shard in found.shards):
        raise typer.Exit(ExitCode.NO)


def _refuse_lost_options(context: typer.Context) -> None:
    """Refuses options before the name of a subcommand, because such options belong to the list, and a subcommand does
    not show the list."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"an option before {context.invoked_subcommand!r} is for the list of shards: put it after the command",
                param_hint=f"'{parameter.opts[0]}'",
            )


def _shard_row(shard: cluster_pb2.ShardInfo, extra: Iterable[str]) -> tuple[str, ...]:
    state = _state(shard)
    return (
        shard.name,
        f"{shard.slots:,}",
        *(f"{count:,}" if (count := getattr(shard, name)) else "" for name in extra),
        "" if state is None else f"{shard.weight:g}",
        state or "",
        _health(shard),
        f"{shard.latency.ToMicroseconds() / 1000:.1f}ms" if shard.reachable else "",
        shard.postgres_version,
        str(shard.schema_version or ""),
        ", ".join(f"{name}={value}" for name, value in sorted(shard.labels.items())),
        shard.error,
    )


def _shard_json(shard: cluster_pb2.ShardInfo) -> dict[str, object]:
    return {
        "shard": shard.name,
        "slots": shard.slots,
        "leaving_slots": shard.leaving_slots,
        "pinned_orgs": shard.pinned_orgs,
        "weight": shard.weight,
        "state": _state(shard),
        "labels": dict(shard.labels),
        "reachable": shard.reachable,
        "disk_full": shard.disk_full,
        "latency_ms": shard.latency.ToMicroseconds() / 1000 if shard.reachable else None,
        "postgres_version": shard.postgres_version or None,
        "schema_version": shard.schema_version or None,
        "error": shard.error or None,
    }


def _file_json(file: cluster_pb2.ClusterFile) -> dict[str, object]:
    from cli.messages import time_json

    return {
        "digest": file.digest,
        "used_since": time_json(file, "used_since"),
        "needs_restart": list(file.needs_restart),
        "refusal": file.refusal.reason or None,
        "refused_digest": file.refusal.digest or None,
    }


def _state(shard: cluster_pb2.ShardInfo) -> str | None:
    """Returns the shard's state in the cluster file, or None if the file does not name the shard."""
    from windrow.v1 import cluster_pb2

    if shard.state == cluster_pb2.SHARD_STATE_NOT_IN_FILE:
        return None
    return cluster_pb2.ShardState.Name(shard.state).removeprefix("SHARD_STATE_").lower()


def _health(shard: cluster_pb2.ShardInfo) -> str:
    from windrow.v1 import cluster_pb2

    if shard.state == cluster_pb2.SHARD_STATE_OFF:
        return "off"
    if shard.disk_full:
        return "disk full"
    return "up" if shard.reachable else "unreachable"


moves.add_to(app)
pins.add_to(app)
clock.add_to(app)
recovery.add_to(app)
differences.add_to(app)
