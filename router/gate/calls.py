"""The path of every call through the gate. The gate finds out who the caller is and whether it may make the call,
admits the call, and decodes and checks the request. The call then runs in a trace span and under a deadline
(DEADLINE_S_MAX if its caller sets none), and its errors become statuses."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health

from router.codec.fields import FIELDS_MAX, bounded, number_in
from router.codec.status import MessageTooLarge, Undecodable
from router.codec.validate import check
from router.gate.admission import (
    MESSAGE_BYTES_MAX,
    METADATA_BYTES_MAX,
    PUBLIC_MESSAGE_BYTES_MAX,
    Context,
    Gate,
)
from router.gate.auth.access import Access, access_of
from router.gate.call import Call, current_call
from router.gate.org_check import OrgOf, org_check
from router.gate.refusal import drop_references, refusal
from shard import metrics
from shard.job_record import ANSWER_BYTES_MAX
from windrow.rules import Rule, limit

# These are not grpc's types, because grpc's stubs have only the types of the server without asyncio.
_Handler = Any
_unary_handler = cast("Callable[..., _Handler]", grpc.stream_unary_rpc_method_handler)
_stream_handler = cast("Callable[..., _Handler]", grpc.stream_stream_rpc_method_handler)
_StreamHandler = Callable[[object, Context], Awaitable[None]]
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Answer = TypeVar("_Answer")
# How much memory an answer may take. Either one number for all answers, or a function that returns the number for a
# request.
AnswerBytes = int | Callable[[Any], int]

# The longest deadline of a call, and its deadline if the caller sets none. It is longer than the longest wait of a
# Dequeue (60 s).
DEADLINE_S_MAX = 75.0
# How much memory is reserved for an answer with jobs. Jobs are added to an answer until it has ANSWER_BYTES_MAX bytes,
# and the last job alone may have nearly that many.
ANSWER_HELD_BYTES = 2 * ANSWER_BYTES_MAX
# How much memory is reserved for an answer about one thing, or with a short result for each of 1,000 jobs.
SMALL_ANSWER_BYTES = 4 * 1024
# For methods that may wait for a minute before they answer. These methods reserve the memory of their answers
# themselves.
RESERVED_BY_METHOD = 0
# The size of an id of a job in a list, with its tag.
LISTED_ID_BYTES = 40
# The request_id of a message that is too large is looked for among this many fields. A message of a stream that keeps
# the other rules has at most five lists of 1,000 entries, and a few fields more.
_ID_WITHIN = 6_000
# How many bytes gRPC counts for each entry of metadata, in addition to those of its key and its value.
_ENTRY_BYTES = 32
_UNRECORDED = contextlib.nullcontext()
# The names of gRPC's status codes.
_CODES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
_OK, _CANCELLED, _UNKNOWN = (
    code.value[0] for code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
)


class Service(Protocol):
    """A service of this router. Its methods get requests that keep the rules, and may raise any exception."""

    @property
    def service_name(self) -> str: ...


class Received(NamedTuple):
    """A message of a stream. The message holds `bytes` bytes of the buffer; the code that handles the message must give
    them back."""

    message: Any
    bytes: int
    # Set if the message has more bytes than the contract allows. Then `message` is None, and `bytes` is 0.
    too_large: MessageTooLarge | None = None


def unary(
    rules: Callable[[Any], None] = check, *, answer_bytes: AnswerBytes, fields_max: int = FIELDS_MAX
) -> Callable[[_Method], _Method]:
    """Declares a method with one request and one answer. `rules` checks the request. `answer_bytes` is how much memory
    the answer may take in addition to that of the request, or a function that returns it for a request that has not
    been checked yet. The memory is reserved before the method begins. `fields_max`: how many fields the request may
    have."""

    def mark(method: _Method) -> _Method:
        cast("Any", method).options = _Options(rules, answer_bytes, DEADLINE_S_MAX, fields_max)
        return method

    return mark


def streamed_answer(
    rules: Callable[[Any], None] = check, *, answer_bytes: AnswerBytes, deadline_s: float = DEADLINE_S_MAX
) -> Callable[[_Method], _Method]:
    """Declares a method with one request and a stream of answers, as an asynchronous generator. `rules` and
    `answer_bytes` are as in `unary`; `answer_bytes` is for one answer of the stream. The call ends after `deadline_s`,
    or earlier at the caller's deadline."""

    def mark(method: _Method) -> _Method:
        cast("Any", method).options = _Options(rules, answer_bytes, deadline_s)
        return method

    return mark


class _Options(NamedTuple):
    """What `unary` and `streamed_answer` declare."""

    rules: Callable[[Any], None]
    answer_bytes: AnswerBytes
    deadline_s: float
    fields_max: int = FIELDS_MAX


def for_each(request: type[Message], field: str, bytes_each: int) -> Callable[[Any], int]:
    """Returns a function that returns the size of the answer to a request: `bytes_each` for each item of the request's
    list `field`. Items beyond the contract's limit do not count, because a request that has more items than the limit
    will be refused."""
    items_max = limit(request, field, Rule.REPEATED_MAX_ITEMS)

    def answer_bytes(of: Message) -> int:
        return SMALL_ANSWER_BYTES + bytes_each * min(len(getattr(of, field)), items_max)

    return answer_bytes


class _Signals:
    """Records the calls of one method: how they ended, and how long they took if the method is unary."""

    def __init__(self, method: str, *, unary: bool) -> None:
        self._calls = {code: metrics.CALLS.labels(method, name) for code, name in _CODES.items()}
        self._seconds = metrics.CALL_SECONDS.labels(method) if unary else None

    def ended(self, began_s: float, code: int) -> None:
        """Counts a call that has ended with this code. `began_s` is when it began, by time.perf_counter."""
        self._calls.get(code, self._calls[_UNKNOWN]).inc()
        if self._seconds is not None:
            self._seconds.observe(time.perf_counter() - began_s)


class Methods(grpc.GenericRpcHandler):
    """All methods that this process serves, by their full names, each behind the gate.

    This is one handler for all methods: with one handler per method, grpc.aio would ask all of them, one after the
    other, for every call.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._handlers: dict[str, _Handler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        count = _metadata_bytes(handler_call_details.invocation_metadata)
        if count > METADATA_BYTES_MAX:
            return _stream_handler(_too_much_metadata(self._gate, count), None, None)
        return self._handlers.get(handler_call_details.method)

    @property
    def names(self) -> Collection[str]:
        """The full names of the methods, such as "/windrow.v1.Queue/Enqueue"."""
        return self._handlers.keys()

    def add(self, service: Service, descriptor: ServiceDescriptor, org_of: OrgOf | None = None) -> None:
        """Adds a service of this router. A method that takes a stream gets its messages and the context; every other
        method gets its request, and is declared by `unary` or `streamed_answer`. `org_of`: how requests without a field
        `org` name the org. If it returns None, the request is about all orgs, and its caller must be allowed to act for
        all orgs."""
        for method in descriptor.methods:
            access = access_of(method, org_elsewhere=org_of is not None)
            act = getattr(service, method.name)
            decode = bounded(
                message_factory.GetMessageClass(method.input_type).FromString,
                method.input_type,
                fields_max=FIELDS_MAX if method.client_streaming else act.options.fields_max,
            )
            if self._gate.audit is not None:
                act = self._gate.audit.around(act, access)
            if method.client_streaming:
                guarded = _stream(
                    self._gate,
                    act,
                    decode,
                    access,
                    access.method,
                    takes_stream=True,
                    id_field=method.input_type.fields_by_name["request_id"].number,
                )
                handler = _stream_handler(guarded, None, _serialize)
            elif method.server_streaming:
                guarded = _streamed_answer(self._gate, act, decode, access, org_of)
                handler = _stream_handler(guarded, None, _serialize)
            else:
                handler = _unary_handler(_unary(self._gate, act, decode, access, org_of))
            self._handlers[f"/{access.method}"] = handler

    def also_as(self, service: str, name: str) -> None:
        """Serves the methods of `service` under this other service name too, with the same messages."""
        prefix = f"/{service}/"
        found = {path: handler for path, handler in self._handlers.items() if path.startswith(prefix)}
        self._handlers |= {f"/{name}/{path.removeprefix(prefix)}": handler for path, handler in found.items()}

    # The next two methods are called by the generated code of a library's service, which expects a server and gets this
    # object.

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Does nothing: the generated code also passes each handler to add_registered_method_handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, _Handler]) -> None:
        for name, handler in handlers.items():
            # Load balancers and probes, which have no token, ask the health service.
            access = None if service == health.SERVICE_NAME else Access(f"{service}/{name}", None)
            assert access is None or handler.request_streaming, "only a method that takes a stream may need a token"
            if handler.request_streaming or handler.response_streaming:
                act = _message_only(handler.stream_stream or handler.unary_stream)
                guarded = _stream(
                    self._gate,
                    act,
                    handler.request_deserializer,
                    access,
                    f"{service}/{name}",
                    takes_stream=handler.request_streaming,
                )
                behind = _stream_handler(guarded, None, handler.response_serializer)
            else:
                behind = _unary_handler(_library_unary(self._gate, handler, access, f"{service}/{name}"))
            self._handlers[f"/{service}/{name}"] = behind


def _metadata_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    return sum(len(key) + len(value) + _ENTRY_BYTES for key, value in metadata)


def _too_much_metadata(gate: Gate, count: int) -> _StreamHandler:
    async def serve(_requests: object, context: Context) -> None:
        gate.refuse_metadata(context, count)
        # The call ends when its connection is closed.
        raise asyncio.CancelledError

    return serve


# Unary methods are registered as methods that take a stream. On the wire, both are the same. So this module receives
# the requests of unary methods itself: under a deadline, and it counts their bytes from the first one.


def _unary(
    gate: Gate,
    method: Callable[[Any], Awaitable[Message | bytes]],
    decode: Callable[[bytes], Message],
    access: Access,
    org_of: OrgOf | None,
) -> Callable[[object, Context], Awaitable[bytes]]:
    options: _Options = cast("Any", method).options
    signals = _Signals(access.method, unary=True)
    check_named = org_check(access, org_of)

    async def act(call: Call, context: Context, raw: bytes) -> bytes:
        request = await _admitted(gate, call, context, decode, raw, options.answer_bytes, check_named)
        del raw
        with gate.tracing.begin(access.method, context) or _UNRECORDED:
            options.rules(request)
            callers_own = _seconds_left(context, options.deadline_s) < options.deadline_s
            work = method(request)
            # Keep no reference: the method may drop the request before it waits.
            del request
            if callers_own:
                # gRPC cancels the call at the caller's own deadline.
                answer = await work
            else:
                async with asyncio.timeout(options.deadline_s):
                    answer = await work
        return _serialize(answer)

    async def serve(_requests: object, context: Context) -> bytes:
        # The code is CANCELLED until another one replaces it, because the client may leave at any moment.
        began_s, code = time.perf_counter(), _CANCELLED
        try:
            call = gate.begin(context)
            if gate.authenticator is not None:
                await _identify(gate, call, context, access)
            answer = await act(call, context, await gate.receive(context, call))
            gate.answered(call, len(answer))
            code = _OK
            return answer
        except Exception as error:  # noqa: BLE001 - every error becomes a status; status_for logs the unexpected ones
            refused, code = refusal(context, error)
        finally:
            signals.ended(began_s, code)
        del context
        return await refused

    return serve


def _streamed_answer(
    gate: Gate,
    method: Callable[[Any], AsyncGenerator[Message, None]],
    decode: Callable[[bytes], Message],
    access: Access,
    org_of: OrgOf | None,
) -> _StreamHandler:
    options: _Options = cast("Any", method).options
    check_named = org_check(access, org_of)

    async def act(call: Call, context: Context) -> None:
        raw = await gate.receive(context, call)
        request = await _admitted(gate, call, context, decode, raw, options.answer_bytes, check_named)
        del raw
        with gate.tracing.begin(access.method, context) or _UNRECORDED:
            options.rules(request)
            async with asyncio.timeout(_seconds_left(context, options.deadline_s)):
                await _write_answers(gate, call, context, method(request))

    return _ended_by_status(gate, act, access, access.method, unary=False)


async def _write_answers(gate: Gate, call: Call, context: Context, answers: AsyncGenerator[Any, Any]) -> None:
    async with contextlib.aclosing(answers):
        async for answer in answers:
            gate.writing(call)
            await context.write(answer)
            gate.written(call)


def _library_unary(
    gate: Gate, handler: _Handler, access: Access | None, method: str
) -> Callable[[object, Context], Awaitable[bytes]]:
    async def act(call: Call, context: Context) -> bytes:
        request = await _public_request(gate, call, context, handler.request_deserializer)
        answer: bytes = handler.response_serializer(await handler.unary_unary(request, context))
        gate.answered(call, len(answer))
        return answer

    return _ended_by_status(gate, act, access, method, unary=True)


async def _public_request(gate: Gate, call: Call, context: Context, decode: Callable[[bytes], Any]) -> Any:
    """Returns the single request of a library's method as soon as there is room for it. Anybody may call such a method.
    So these calls have a limit of their own, and do not count against the limits of other calls. Raises
    MessageTooLarge, RouterFull, Undecodable."""
    raw = await gate.receive(context, call, bytes_max=PUBLIC_MESSAGE_BYTES_MAX)
    await call.reserve(len(raw), received=len(raw))
    return _decoded(decode, raw)


def _stream(
    gate: Gate,
    method: Callable[[Any, Context], Any],
    decode: Callable[[bytes], Any],
    access: Access | None,
    method_name: str,
    *,
    takes_stream: bool,
    id_field: int = 0,
) -> _StreamHandler:
    """Serves a method that takes a stream, or a method of a library that answers with a stream. `method` gets the
    messages of the stream, or its single request, and the context. It writes its answers to the context, or is an
    asynchronous generator of answers. `id_field`: the number of the field request_id of the messages; 0 if they have
    none."""

    async def act(call: Call, context: Context) -> None:
        if takes_stream:
            received: object = _messages(gate, call, context, decode, id_field)
        else:
            received = await _public_request(gate, call, context, decode)
        answers = method(received, context)
        if inspect.isasyncgen(answers):
            await _write_answers(gate, call, context, answers)
        else:
            await answers

    return _ended_by_status(gate, act, access, method_name, unary=False)


def _ended_by_status(
    gate: Gate,
    act: Callable[[Call, Context], Awaitable[_Answer]],
    access: Access | None,
    method: str,
    *,
    unary: bool,
) -> Callable[[object, Context], Awaitable[_Answer]]:
    """Lets in a streaming call, or a unary call of a library, and ends it with the status of its error, if any."""
    signals = _Signals(method, unary=unary)

    async def serve(_requests: object, context: Context) -> _Answer:
        began_s, code = time.perf_counter(), _CANCELLED
        try:
            call = gate.begin(context)
            if access is None:
                with gate.public(call):
                    answer = await act(call, context)
            else:
                await _identify(gate, call, context, access)
                with gate.lasting(call):
                    answer = await act(call, context)
            code = _OK
            return answer
        except grpc.aio.InternalError as error:
            # gRPC could not write: the client is gone, and needs no status.
            drop_references(error)
            code = _code_of(context)
            refused = None
        except grpc.aio.AbortError as error:
            # The library's method has ended the call with a status of its own. As in refusal(), no frame may keep a
            # reference to the context.
            drop_references(error)
            code = _code_of(context)
            del context
            raise
        except Exception as error:  # noqa: BLE001 - every error becomes a status; status_for logs the unexpected ones
            refused, code = refusal(context, error)
        finally:
            signals.ended(began_s, code)
        del context
        if refused is None:
            raise asyncio.CancelledError
        return await refused

    return serve


async def _messages(
    gate: Gate, call: Call, context: Context, decode: Callable[[bytes], Any], id_field: int
) -> AsyncGenerator[Received, None]:
    """Yields the messages of a stream, each as soon as the buffer has room for it. Raises RouterFull, Undecodable."""
    while isinstance(raw := await context.read(), bytes):
        gate.received(call, raw)
        count = len(raw)
        if count > MESSAGE_BYTES_MAX:
            request_id = number_in(raw, id_field, fields_max=_ID_WITHIN) if id_field else 0
            refused = MessageTooLarge(count, MESSAGE_BYTES_MAX, request_id)
            del raw
            yield Received(None, 0, refused)
            continue
        await call.reserve(count, received=count)
        message = _decoded(decode, raw)
        del raw
        yield Received(message, count)
        del message


def _message_only(act: Callable[..., Any]) -> Callable[[Any, Context], Any]:
    """Adapts a method of a library, which expects a stream of plain messages."""

    async def messages(received: AsyncGenerator[Received, None]) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(received):
            async for message, count, refused in received:
                if refused is not None:
                    raise refused
                yield message
                current_call().give_back(count)

    def adapted(received: Any, context: Context) -> Any:
        is_stream = inspect.isasyncgen(received)
        return act(messages(cast("AsyncGenerator[Received, None]", received)) if is_stream else received, context)

    return adapted


async def _identify(gate: Gate, call: Call, context: Context, access: Access) -> None:
    """Records in the call who makes it, in a cluster that authenticates callers. Raises Unauthenticated, ScopeMissing
    and RouterFull. Raises ShardError if the router cannot find out now who the caller is."""
    if gate.authenticator is None:
        return
    try:
        call.principal = await gate.authenticator.principal(context)
    except asyncio.CancelledError:
        gate.was_reset(call)
        raise
    access.check(call.principal)
    gate.identified(call)


async def _admitted(
    gate: Gate,
    call: Call,
    context: Context,
    decode: Callable[[bytes], Message],
    raw: bytes,
    answer_bytes: AnswerBytes,
    check_named: Callable[[Call, Context, Any], str | None],
) -> Any:
    """Returns the request as soon as there is room for it and for its answer. Raises RouterFull, Undecodable,
    InvalidRequest, OrgForbidden, ScopeMissing."""
    request = _decoded(decode, raw)
    # Check the org first, so that a call never counts for an org that its caller may not use.
    org = check_named(call, context, request)
    # Calls of operators may have no org. All calls without an org share one quota.
    gate.admit(call, org or call.org)
    count = len(raw) + (answer_bytes if isinstance(answer_bytes, int) else answer_bytes(request))
    if not call.take_in_turn(count):
        # While the call waits, keep only the raw bytes: the decoded message takes more memory.
        del request
        await call.reserve(count, received=len(raw))
        request = _decoded(decode, raw)
    return request


def _decoded(decode: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return decode(raw)
    except DecodeError as error:
        raise Undecodable(len(raw)) from error


def _serialize(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def _code_of(context: Context) -> int:
    """Returns the code with which a library's method has ended its call. If the method has not ended the call, returns
    CANCELLED, because the client has left."""
    # The code is None, a number, or a member of an enum. The type stubs do not say so.
    code = cast("grpc.StatusCode | int | None", context.code())
    return _CANCELLED if code is None else code if isinstance(code, int) else code.value[0]


def _seconds_left(context: Context, at_most: float) -> float:
    """Returns the seconds until the caller's deadline, at most `at_most`."""
    # If the caller has set no deadline, time_remaining() returns None. The type stubs do not say so.
    left = cast("float | None", context.time_remaining())
    return at_most if left is None else min(left, at_most)
