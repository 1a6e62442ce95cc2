"""What every method goes through, whatever it asks: the gate, its request's decoding, its rules, its span, its
deadline, and its errors' statuses."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from router.gate import Call, Context, Gate
from router.status import INTERNAL, Undecodable, status_of
from router.validation import check
from shard.records import ANSWER_BYTES_MAX

_log = logging.getLogger(__name__)
# As grpc has them: the methods of libraries are typed for its other server.
_Handler = Any
_unary_handler = cast("Callable[..., _Handler]", grpc.stream_unary_rpc_method_handler)
_stream_handler = cast("Callable[..., _Handler]", grpc.stream_stream_rpc_method_handler)
_Method = TypeVar("_Method", bound=Callable[..., Any])

# A caller without a deadline of its own does not hold a connection for ever. The longest wait (60 s) has room in it.
DEADLINE_S_MAX = 75.0
# What is held for an answer of jobs before it is known: it ends with the job that fills ANSWER_BYTES_MAX, and that one
# may have as much again.
ANSWER_HELD_BYTES = 2 * ANSWER_BYTES_MAX
_UNRECORDED = contextlib.nullcontext()
# At most one log line of undecodable requests in so many seconds.
_UNDECODABLE_LOG_S = 60.0


class Service(Protocol):
    """A service of ours. Its methods take requests that keep the rules, and raise what they like."""

    @property
    def service_name(self) -> str: ...


class Received(NamedTuple):
    """A message of a stream. `bytes`: what it holds of the buffer, until whoever is done with it gives that back."""

    message: Any
    bytes: int


def unary(rules: Callable[[Any], None] = check, *, answer_bytes: int = 0) -> Callable[[_Method], _Method]:
    """How a method's requests are checked, and how many bytes its answer may have beyond those of the request: as many
    are reserved before it begins."""

    def mark(method: _Method) -> _Method:
        marked = cast("Any", method)
        marked.rules, marked.answer_bytes = rules, answer_bytes
        return method

    return mark


class Methods(grpc.GenericRpcHandler):
    """All methods that this process serves, by their full names, each behind the gate.

    One handler for all: of methods that are registered one by one, grpc.aio awaits each for every call that comes.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._handlers: dict[str, _Handler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        return self._handlers.get(handler_call_details.method)

    def add(self, service: Service, descriptor: ServiceDescriptor) -> None:
        """A service of ours: unary methods take a request, others take messages or a request, and the context."""
        for method in descriptor.methods:
            decode = message_factory.GetMessageClass(method.input_type).FromString
            act = getattr(service, method.name)
            if method.client_streaming or method.server_streaming:
                guarded = _streaming(self._gate, act, decode, takes_stream=method.client_streaming)
                handler = _stream_handler(guarded, None, _serialize)
            else:
                name = f"{descriptor.full_name}/{method.name}"
                handler = _unary_handler(_unary(self._gate, act, decode, name))
            self._handlers[f"/{descriptor.full_name}/{method.name}"] = handler

    # A service of a library is added as its generated code does it.

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """They come again, one by one."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, _Handler]) -> None:
        for name, handler in handlers.items():
            if handler.request_streaming or handler.response_streaming:
                act = _message_only(handler.stream_stream or handler.unary_stream)
                guarded = _streaming(
                    self._gate, act, handler.request_deserializer, takes_stream=handler.request_streaming
                )
                behind = _stream_handler(guarded, None, handler.response_serializer)
            else:
                behind = _unary_handler(_library_unary(self._gate, handler))
            self._handlers[f"/{service}/{name}"] = behind


# Unary methods are registered as those whose request is a stream, which is the same on the wire: so their requests are
# received here, under a deadline, and counted from their first byte.


def _unary(
    gate: Gate, method: Callable[[Any], Awaitable[Message | bytes]], decode: Callable[[bytes], Message], name: str
) -> Callable[[object, Context], Awaitable[bytes]]:
    marked = cast("Any", method)
    rules: Callable[[Any], None] = marked.rules
    answer_bytes: int = marked.answer_bytes

    async def act(call: Call, context: Context, raw: bytes) -> bytes:
        request = _decoded(decode, raw)
        # Those of no org are an operator's.
        await gate.enter(call, getattr(request, "org", ""), len(raw) + answer_bytes)
        del raw
        with gate.tracing.begin(name, context) or _UNRECORDED:
            rules(request)
            if seconds_left(context) < DEADLINE_S_MAX:
                # At the caller's own deadline gRPC cancels us.
                answer = await method(request)
            else:
                async with asyncio.timeout(DEADLINE_S_MAX):
                    answer = await method(request)
        return _serialize(answer)

    async def serve(_requests: object, context: Context) -> bytes:
        try:
            call = gate.begin(context)
            answer = await act(call, context, await gate.receive(context, call))
            gate.answered(call, len(answer))
            return answer
        except Exception as error:  # noqa: BLE001 - every error becomes a status; told logs the unexpected
            refused = refusal(context, error)
        del context
        return await refused

    return serve


def _library_unary(gate: Gate, handler: _Handler) -> Callable[..., Awaitable[bytes]]:
    async def serve(_requests: object, context: Context) -> bytes:
        try:
            call = gate.begin(context)
            raw = await gate.receive(context, call)
            await gate.enter(call, "", len(raw))
            request = _decoded(handler.request_deserializer, raw)
        except Exception as error:  # noqa: BLE001 - every error becomes a status; told logs the unexpected
            refused = refusal(context, error)
        else:
            answer: bytes = handler.response_serializer(await handler.unary_unary(request, context))
            gate.answered(call, len(answer))
            return answer
        del context
        return await refused

    return serve


def _streaming(
    gate: Gate, act: Callable[[Any, Context], Any], decode: Callable[[bytes], Any], *, takes_stream: bool
) -> Callable[[object, Context], Awaitable[None]]:
    """`act` gets what the stream receives, or the one request, and the context. It writes to the context, or is an
    asynchronous generator of answers."""

    async def serve(_requests: object, context: Context) -> None:
        try:
            call = gate.begin(context)
            if takes_stream:
                told: object = _messages(gate, call, context, decode)
            else:
                raw = await gate.receive(context, call)
                told = _decoded(decode, raw)
                await gate.enter(call, "", len(raw))
            answers = act(told, context)
            if not inspect.isasyncgen(answers):
                await answers
                return
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    gate.writing(call)
                    await context.write(answer)
                    gate.written(call)
            return
        except grpc.aio.InternalError as error:
            # gRPC could not write: the client is gone, and there is nobody to tell.
            _let_go(error)
            refused = None
        except Exception as error:  # noqa: BLE001 - every error becomes a status; told logs the unexpected
            refused = refusal(context, error)
        del context
        if refused is None:
            raise asyncio.CancelledError
        await refused

    return serve


async def _messages(
    gate: Gate, call: Call, context: Context, decode: Callable[[bytes], Any]
) -> AsyncGenerator[Received, None]:
    """The messages of a stream, each once there is room for it. Raises RouterFull, Undecodable."""
    while isinstance(raw := await context.read(), bytes):
        gate.received(call, raw)
        count = len(raw)
        await call.reserve(count)
        message = _decoded(decode, raw)
        del raw
        yield Received(message, count)
        del message


def _message_only(act: Callable[..., Any]) -> Callable[[Any, Context], Any]:
    """A method of a library, whose streams are of plain messages."""

    async def messages(received: AsyncGenerator[Received, None]) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(received):
            async for message, _ in received:
                yield message

    def adapted(told: Any, context: Context) -> Any:
        is_stream = inspect.isasyncgen(told)
        return act(messages(cast("AsyncGenerator[Received, None]", told)) if is_stream else told, context)

    return adapted


def _decoded(decode: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return decode(raw)
    except DecodeError as error:
        raise Undecodable(len(raw)) from error


def _serialize(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def refusal(context: Context, error: Exception) -> Awaitable[NoReturn]:
    """Awaited, ends a call with the status of an error.

    gRPC keeps the exception that this raises with the call, and the exception keeps the frames that it goes through. So
    whoever awaits this has handled the error, and deleted its names for the call and its requests: else they would be
    a cycle, and stay until the garbage collector looks for it, which is seldom.
    """
    return context.abort_with_status(rpc_status.to_status(told(error)))  # pyright: ignore[reportUnknownMemberType]


class _Undecodables:
    """Counts requests that cannot be decoded, and writes one line about them in a while."""

    def __init__(self) -> None:
        self._count = 0
        self._next_s = 0.0

    def count(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._count += 1
        if now_s >= self._next_s:
            _log.warning("refused %d request(s) that cannot be decoded", self._count)
            self._count, self._next_s = 0, now_s + _UNDECODABLE_LOG_S


_undecodables = _Undecodables()


def told(error: Exception) -> Status:
    """The status that tells the caller of this error, which then keeps nothing that it has come through."""
    status = status_of(error)
    if status.code == INTERNAL:
        _log.error("a call failed unexpectedly", exc_info=error)
    elif isinstance(error, Undecodable):
        _undecodables.count()
    _let_go(error)
    return status


def _let_go(error: BaseException) -> None:
    """Has an error keep nothing that it has come through: its frames would keep the call, and be kept by it."""
    passed: BaseException | None = error
    while passed is not None:
        before = passed.__context__
        passed.__traceback__ = passed.__context__ = None
        passed = before


def seconds_left(context: Context, *, at_most: float = DEADLINE_S_MAX) -> float:
    """The time the caller still gives, within bounds."""
    # The stubs leave out that it is None for a caller without a deadline.
    left = cast("float | None", context.time_remaining())
    return at_most if left is None else min(left, at_most)
