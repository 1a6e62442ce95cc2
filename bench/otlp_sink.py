"""`python -m bench.otlp_sink --listen HOST:PORT`: takes traces by OTLP over gRPC, counts their spans, and forgets them.
Prints `ready PORT`, answers each line of its input with the count so far, and ends when its input ends."""

from __future__ import annotations

import argparse
import asyncio
import sys

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


async def main(listen: str) -> None:
    spans = 0

    async def export(request: ExportTraceServiceRequest, _context: object) -> ExportTraceServiceResponse:
        nonlocal spans
        spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return ExportTraceServiceResponse()

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(
        export,  # pyrefly: ignore[bad-argument-type]
        request_deserializer=ExportTraceServiceRequest.FromString,
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    port = server.add_insecure_port(listen)
    await server.start()
    print(f"ready {port}", flush=True)
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    while await questions.readline():
        print(spans, flush=True)
    await server.stop(grace=None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.otlp_sink")
    parser.add_argument("--listen", default="127.0.0.1:0")
    asyncio.run(main(parser.parse_args().listen))
