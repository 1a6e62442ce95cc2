"""`windrow server`: the version and the limits of the router that answers."""

from __future__ import annotations

from datetime import timedelta

from cli import options, output, values
from cli.output import Column


def server(
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Shows the version and the limits of the router that answers.

    During an upgrade, routers of one address may differ.
    """
    from cli.calls import connect
    from windrow.server_info import read_server_info
    from windrow.v1 import server_pb2

    with connect(address, timeout) as router:
        info = read_server_info(router.call(router.queue.GetServerInfo, server_pb2.GetServerInfoRequest()))
    features, lists = sorted(info.features), sorted(info.consume_lists)
    if as_json:
        limits = dict(_limit_json(name, value) for name, value in info.limits.items())
        output.say_json([{"version": info.version, "features": features, "consume_lists": lists, "limits": limits}])
        return
    columns = [Column(title="limit"), Column(title="value", right=True)]
    output.table(columns, [(name, _limit_text(value)) for name, value in info.limits.items()])
    output.say(output.visible(f"router {info.version}, features: {', '.join(features) or 'none'}"))
    output.say(output.visible(f"streams take {', '.join(lists)}"))


def _limit_json(name: str, value: int | timedelta) -> tuple[str, object]:
    return (f"{name}_s", value.total_seconds()) if isinstance(value, timedelta) else (name, value)


def _limit_text(value: int | timedelta) -> str:
    return values.exact(value) if isinstance(value, timedelta) else f"{value:,}"
