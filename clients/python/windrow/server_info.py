"""A router's version and limits (GetServerInfo). No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from windrow.v1 import server_pb2

_PREFIX = "SERVER_FEATURE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The version, limits and features of the router that answered. During an upgrade, the routers behind one address
    may differ."""

    # The release of the router, such as "0.1.0". Programs should make decisions by limits and features, and not by the
    # version.
    version: str
    # The limits by their names in the contract (ServerLimits in windrow/v1/server.proto), such as
    # limits["max_message_bytes"]. A limit that the router does not send, because it is older than this client, is
    # absent.
    limits: Mapping[str, int | timedelta]
    # The names of the features without the prefix SERVER_FEATURE_, such as "ORG_METADATA". A feature that this client
    # does not know is a number.
    features: frozenset[str]
    # The lists of ConsumeRequest that the router takes, such as "acks" (windrow/v1/server.proto).
    consume_lists: frozenset[str]


def read_server_info(message: server_pb2.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        limits={
            field.name: value.ToTimedelta() if isinstance(value, Duration) else int(value)
            for field, value in message.limits.ListFields()
        },
        features=frozenset(map(_feature_name, message.features)),
        consume_lists=frozenset(message.consume_lists),
    )


def _feature_name(feature: server_pb2.ServerFeature.ValueType) -> str:
    if feature not in server_pb2.ServerFeature.values():
        return str(feature)
    return server_pb2.ServerFeature.Name(feature).removeprefix(_PREFIX)
