"""Counts the messages of this process's Consume streams, where gRPC encodes and decodes them.

This works for the stubs and for windrow.Worker, without changes to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

_CONSUME = "/windrow.v1.Queue/Consume"


@dataclass(slots=True, kw_only=True)
class Messages:
    """The messages that this process has received and sent."""

    received: int = 0
    # How many messages brought jobs, and how many jobs these messages brought.
    with_jobs: int = 0
    jobs: int = 0
    sent: int = 0
    # How many messages carried acks, and how many acks these messages carried.
    with_acks: int = 0
    acks: int = 0


# The messages of this process since it began.
MESSAGES = Messages()


def watch() -> None:
    """Counts the messages of every Consume stream that this process opens from now on."""
    channel: Any = type(grpc.aio.insecure_channel("localhost:1"))
    if not hasattr(channel, "counts_messages"):
        channel.stream_stream = _watched(channel.stream_stream)
        channel.counts_messages = True


def _watched(stream_stream: Callable[..., Any]) -> Callable[..., Any]:
    def opened(
        self: Any, method: str, request_serializer: Any = None, response_deserializer: Any = None, **others: Any
    ) -> Any:
        if method == _CONSUME:
            request_serializer = _sent(request_serializer)
            response_deserializer = _received(response_deserializer)
        return stream_stream(self, method, request_serializer, response_deserializer, **others)

    return opened


def _sent(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def counted(request: Any) -> bytes:
        MESSAGES.sent += 1
        if acks := len(request.acks):
            MESSAGES.with_acks += 1
            MESSAGES.acks += acks
        return serialize(request)

    return counted


def _received(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def counted(data: bytes) -> Any:
        response = deserialize(data)
        MESSAGES.received += 1
        if jobs := len(response.jobs):
            MESSAGES.with_jobs += 1
            MESSAGES.jobs += jobs
        return response

    return counted
