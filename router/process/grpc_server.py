"""A gRPC server that no request can end.

grpc.aio takes all calls in one loop, which decodes the names of their methods as UTF-8. A single call with a name that
is not UTF-8 ends the loop, and with it the server; anybody who reaches the port can send such a call (grpcio 1.85.1).
In this module, gRPC's core finds the method of a call; for this, it only compares bytes. Each method has a loop of its
own that takes its calls, and one more loop takes the calls of unknown methods without asking for their names.

This uses private parts of grpc.aio. The version of grpcio is pinned, and tests/fault/test_malformed.py sends such
calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import grpc

# grpcio has no types for this module.
from grpc._cython import cygrpc as _cygrpc  # type: ignore[attr-defined]

from router.errors import CannotListen

cygrpc: Any = _cygrpc


class GrpcServer:
    """Serves the calls of the methods `names`, such as "/windrow.v1.Queue/Enqueue", with the handlers that `handler`
    returns. Calls of other methods end with UNIMPLEMENTED. `options`: channel arguments of gRPC."""

    def __init__(
        self, handler: grpc.GenericRpcHandler, names: Iterable[str], *, options: Sequence[tuple[str, int]]
    ) -> None:
        self._server = _Acceptor(handler, names, options)

    def listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Listens on this address and returns the port. Without `credentials`, the server speaks no TLS. Raises
        CannotListen."""
        port: int = (
            self._server.add_insecure_port(address.encode())
            if credentials is None
            else self._server.add_secure_port(address.encode(), credentials)
        )
        if not port:
            # gRPC does not say why.
            raise CannotListen(f"cannot listen on {address}: it is in use, or is no address of this machine")
        return port

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Ends the calls that still run, and waits until they have ended."""
        await self._server.shutdown(None)

    async def ended(self) -> None:
        """Waits until the server has stopped. If the server ended by itself, raises the error that has ended it."""
        # Without a timeout, a caller that is cancelled would cancel the future that `stop` waits for.
        while await self._server.wait_for_termination(3600.0):
            pass


class _Acceptor(cygrpc.AioServer):  # type: ignore[misc]
    def __init__(
        self, handler: grpc.GenericRpcHandler, names: Iterable[str], options: Sequence[tuple[str, int]]
    ) -> None:
        super().__init__(asyncio.get_running_loop(), None, (), (), tuple(options), None)
        # gRPC's core only needs the names. `handler` has the handlers, and sees every call.
        self.add_registered_method_handlers(dict.fromkeys(names))
        self._resolver = cygrpc._MethodResolver([handler], {})
        # The event loop keeps only weak references to its tasks.
        self._calls: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[NoReturn]:
        """gRPC calls this at the start: once for each method, and once with None for all other methods. When this task
        ends, the server ends."""
        return asyncio.get_running_loop().create_task(self._accept(method))

    async def _accept(self, method: bytes | None) -> NoReturn:
        loop = asyncio.get_running_loop()
        # The empty name stands for an unknown method: no method has this name.
        name = "" if method is None else method.decode()
        while True:
            try:
                state = await (self._request_call() if method is None else self._request_registered_call(method))  # pyrefly: ignore[unknown-variable-type]
            except cygrpc._RequestCallError:
                if not self.is_running():
                    raise
                continue
            handling = cygrpc._handle_rpc(name, self._resolver, (), state, loop, False)
            call = loop.create_task(cygrpc._schedule_rpc_coro(handling, state, loop, name))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
