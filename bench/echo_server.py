"""`python -m bench.echo_server --listen HOST:PORT`: a process that answers Enqueue, Dequeue and Ack, and does nothing
else. Its answers have the shape and the size of a router's answers. Prints `ready`, and ends when its input ends."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from bench.payloads import stamped
from windrow.ids import uuid7
from windrow.v1 import job_pb2, queue_pb2

_LEASE_BYTES = 29


@lru_cache
def _enqueued(jobs: int) -> queue_pb2.EnqueueResponse:
    return queue_pb2.EnqueueResponse(results=[queue_pb2.EnqueueResult(id=uuid7()) for _ in range(jobs)])


@lru_cache
def _dequeued(jobs: int) -> queue_pb2.DequeueResponse:
    now = Timestamp()
    now.GetCurrentTime()
    leased = [
        job_pb2.LeasedJob(
            lease=bytes(range(_LEASE_BYTES)),
            id=uuid7(),
            queue="work",
            kind="no-op",
            payload=stamped(1)[0],
            priority=5,
            attempt=1,
            max_attempts=20,
            enqueued_at=now,
            run_at=now,
        )
        for _ in range(jobs)
    ]
    return queue_pb2.DequeueResponse(jobs=leased, lease_deadline=now, visibility_window=Duration(seconds=30))


@lru_cache
def _acked(jobs: int) -> queue_pb2.AckResponse:
    return queue_pb2.AckResponse(answers=[job_pb2.JOB_ANSWER_OK] * jobs)


def _method(request: type[Message], answer: Callable[[Any], Message]) -> grpc.RpcMethodHandler[Any, Any]:
    async def serve(message: Any, _context: object) -> Message:
        return answer(message)

    return grpc.unary_unary_rpc_method_handler(
        serve,  # pyrefly: ignore[bad-argument-type]
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),  # pyrefly: ignore[unknown-return-type]
    )


async def main(listen: str) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", -1)])
    methods = {
        "Enqueue": _method(queue_pb2.EnqueueRequest, lambda message: _enqueued(len(message.jobs))),
        "Dequeue": _method(queue_pb2.DequeueRequest, lambda message: _dequeued(message.max_jobs)),
        "Ack": _method(queue_pb2.AckRequest, lambda message: _acked(len(message.acks))),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("windrow.v1.Queue", methods),))
    server.add_insecure_port(listen)
    await server.start()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    ended = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
    await ended.read()
    await server.stop(grace=None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.echo_server")
    parser.add_argument("--listen", required=True)
    asyncio.run(main(parser.parse_args().listen))
