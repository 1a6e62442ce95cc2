"""A worker's stream to a router. A stream that breaks is replaced by a new one.

This module owns the credit, which is the number of jobs that the router may still send. job_runner.py runs the jobs,
and settlements.py has the reports about them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, cast

from grpc import StatusCode, aio

from windrow.calls import patient_pause_s
from windrow.client import Client
from windrow.errors import (
    FATAL,
    ClientClosed,
    InvalidRequest,
    RouterError,
    TlsFailed,
    Unauthenticated,
    Unavailable,
    WindrowError,
)
from windrow.jobs import Answer, answer_of
from windrow.leases import Connectivity, log
from windrow.settlements import Backoff, Settlements
from windrow.tokens import RENEWAL_S_MAX, Metadata
from windrow.v1 import job_pb2, queue_pb2

if TYPE_CHECKING:
    _Call = aio.StreamStreamCall[queue_pb2.ConsumeRequest, queue_pb2.ConsumeResponse]

AWAY_FIRST_S, AWAY_MAX_S = 0.05, 2.0
# The contract's limit for one stream.
KINDS_MAX = 64
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
# The reason of an error (docs/errors.md).
_EXPIRED = "STREAM_EXPIRED"
# The code of Settled.error for a message that was too large. The router ignores such a message.
_TOO_LARGE: int = StatusCode.INVALID_ARGUMENT.value[0]
# A refused stream ends within this time after its initial metadata.
_REFUSED_S_MAX = 0.1
# If a stream lasts longer than this, the pauses between streams begin with the shortest one again. An answer of the
# router is not enough for that, because a router may answer and then fail at once, again and again.
_STEADY_S = 1.0


class ConsumeStream:
    """The consumer's side of the Consume call.

    `jobs_wanted` returns how many more jobs the worker would take now. `take` is called with received jobs and the time
    of their receipt (monotonic seconds). `revoked` is called with leases that have ended although the worker did not
    end them.
    """

    def __init__(
        self,
        client: Client,
        start: queue_pb2.ConsumeStart,
        *,
        settlements: Settlements,
        connectivity: Connectivity,
        jobs_wanted: Callable[[], int],
        take: Callable[[Sequence[job_pb2.LeasedJob], float], None],
        revoked: Callable[[Mapping[bytes, Answer]], None],
    ) -> None:
        self._client = client
        self._start = start
        self._settlements = settlements
        self._connectivity = connectivity
        self._jobs_wanted = jobs_wanted
        self._take = take
        self._revoked = revoked
        # How many jobs the router may still send on this stream.
        self._credit = 0
        # The token of this stream.
        self._token: Metadata = ()
        # True: the stream's token is new, and no router has accepted it yet.
        self._renewed = False
        self._refusals = client.calls.refusals()
        # True: the log says already that the token is refused.
        self._told_of_refusal = False
        # True: the router has announced that it will end this stream.
        self._draining = False
        # The credit of messages that are not answered yet, by their request_id.
        self._unconfirmed: dict[int, int] = {}
        # True: a write has failed, because the stream had ended.
        self._write_failed = False
        self._closing = asyncio.Event()
        self._backoff = Backoff(AWAY_FIRST_S, AWAY_MAX_S)

    def tell_kinds(self, kinds: Collection[str]) -> None:
        """Tells routers which kinds the worker has handlers for, from the next stream on. If there are more kinds than
        a stream may name, tells none. Routers then assume that the worker takes all kinds."""
        if len(kinds) <= KINDS_MAX:
            # Leave out kinds that do not match _KIND: no job has such a kind, and the router would refuse the stream.
            self._start.kinds[:] = sorted(filter(_KIND.fullmatch, kinds))

    async def run(self) -> None:
        """Runs until close(). Raises a WindrowError that no retry can fix, or what the token function raises when the
        client calls it for the first time."""
        while not (self._closing.is_set() and self._settlements.idle.is_set()):
            began = time.monotonic()
            try:
                await self._session()
                if self._draining:
                    # The router closes the connection now. Wait until it is closed, so that the next stream uses
                    # another router.
                    await self._pause(self._backoff.next_s())
            except Unauthenticated as error:
                self._settlements.on_disconnect()
                await self._renew_token(error)
            except FATAL as error:
                if not isinstance(error, InvalidRequest) or not self._settlements.on_stream_refused(error):
                    raise
                await self._pause(self._backoff.next_s())
            except WindrowError as error:
                self._settlements.on_disconnect()
                if self._may_have_expired(error, lasted_s=time.monotonic() - began):
                    # This is no outage: a router ends every stream from time to time.
                    await self._pause(self._backoff.next_s())
                    continue
                explained = await self._client.calls.explained(error)
                if isinstance(explained, TlsFailed):
                    raise explained from error
                self._connectivity.failed(explained)
                await self._pause(patient_pause_s(error, own_s=self._backoff.next_s()))

    async def _renew_token(self, refusal: Unauthenticated) -> None:
        """Asks for another token after a refusal. If there is no other token, waits before the next try, because the
        refused token may be accepted again. Raises the refusal when it is time to give up."""
        final = self._refusals.is_final()
        failure: Exception | None = None
        try:
            if await self._client.calls.renew_token(self._token) and not self._renewed:
                self._renewed = True
                return
        except Exception as error:  # noqa: BLE001 - the token function may raise anything
            failure = error
        if final:
            if failure is None:
                raise refusal
            raise refusal from failure
        if not self._told_of_refusal:
            self._told_of_refusal = True
            log.warning(
                "%s: the token is refused, and there is no better one; the worker goes on trying for %g s, and "
                "handlers that run continue: %s",
                self._start.worker,
                RENEWAL_S_MAX,
                refusal if failure is None else f"{type(failure).__name__}: {failure}",
            )
        await self._pause(self._backoff.next_s())

    def _on_accepted(self) -> None:
        self._renewed = self._told_of_refusal = False
        self._refusals.accepted()

    def _may_have_expired(self, error: WindrowError, *, lasted_s: float) -> bool:
        """Returns whether the stream may have ended because of its age. If gRPC is writing when a stream ends, gRPC
        reports an internal error instead of the router's status. (The messages of the router are still read.)"""
        masked = self._write_failed and isinstance(error, RouterError) and lasted_s > _REFUSED_S_MAX
        return masked or error.reason == _EXPIRED

    def close(self) -> None:
        """Ends the stream in an orderly way, after everything has been sent and answered."""
        self._closing.set()
        self._settlements.wake.set()

    async def _session(self) -> None:
        """Runs one stream from start to an orderly end. Raises WindrowError if the stream ends in any other way."""
        began = time.monotonic()
        self._credit = 0
        self._draining = False
        self._unconfirmed.clear()
        self._write_failed = False
        self._token = await self._client.calls.token()
        org = self._start.org if self._start.HasField("org") else None
        call = self._client.calls.open(lambda stub: stub.Consume, org=org, token=self._token)
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(work)
                    for work in (self._write(call), self._confirm_connected(call), self._watch_answers())
                ]
                await self._read(call)
                for task in helpers:
                    task.cancel()
        except BaseExceptionGroup as errors:
            self._raise(errors, began)
        finally:
            if time.monotonic() - began > _STEADY_S:
                self._backoff.reset()
            call.cancel()

    async def _read(self, call: _Call) -> None:
        try:
            # Do not use call.read(): when the stream ends, read() drops messages that have arrived before, and the jobs
            # in them.
            async for response in call:
                self._on_response(response)
        except asyncio.CancelledError:
            # Closing a channel cancels its streams. A cancellation of this task is raised again.
            task = asyncio.current_task()
            if self._client.calls.closed and task is not None and not task.cancelling():
                raise ClientClosed(f"Consume at {self._client.calls.address}: the client was closed") from None
            raise
        if not (self._closing.is_set() or self._draining):
            raise Unavailable(f"Consume at {self._client.calls.address}: the router ended the stream")

    def _on_response(self, response: queue_pb2.ConsumeResponse) -> None:
        received_at = time.monotonic()
        self._on_accepted()
        if jobs := response.jobs:
            self._connectivity.answered()
            self._credit = max(0, self._credit - len(jobs))
            self._take(jobs, received_at)
        for settled in response.settled:
            self._settlements.answered(settled)
            self._count_refused_credit(settled)
        if response.revoked:
            self._revoked({one.lease: answer_of(one.answer) for one in response.revoked})
        if response.draining:
            self._draining = True
        self._settlements.wake.set()

    def _count_refused_credit(self, settled: queue_pb2.Settled) -> None:
        """Subtracts the credit that a too large message gave, because the router has not counted this credit."""
        given = self._unconfirmed.pop(settled.request_id, 0)
        if settled.error.code == _TOO_LARGE:
            self._credit = max(0, self._credit - given)

    async def _write(self, call: _Call) -> None:
        wake, settlements = self._settlements.wake, self._settlements
        request = queue_pb2.ConsumeRequest(start=self._start)
        while True:
            wake.clear()
            if self._draining:
                # Send nothing more on this stream: all later entries are sent on the next stream.
                if settlements.unanswered_since() is None:
                    await call.done_writing()
                    return
                await wake.wait()
                continue
            has_content = settlements.fill(request) or request.HasField("start")
            wanted = self._jobs_wanted()
            more = wanted - self._credit
            # Do not send a message for each job. If there is nothing else to send, send credit only when the router's
            # remaining credit is at most half of the wanted jobs. If there is something else to send, add the credit to
            # that message.
            if more > 0 and (has_content or self._credit * 2 <= wanted):
                request.credit = more
                self._credit += more
                if request.request_id:
                    self._unconfirmed[request.request_id] = more
                has_content = True
            if has_content:
                try:
                    await call.write(request)
                except (aio.AioRpcError, asyncio.InvalidStateError):
                    # The stream has ended. _read() raises the reason.
                    self._write_failed = True
                    return
                request = queue_pb2.ConsumeRequest()
            elif self._closing.is_set() and settlements.idle.is_set():
                await call.done_writing()
                return
            else:
                await wake.wait()

    async def _confirm_connected(self, call: _Call) -> None:
        away_since = self._connectivity.away_since
        await call.initial_metadata()
        # A refused stream has initial metadata, too, but ends right after the metadata.
        await asyncio.sleep(_REFUSED_S_MAX)
        if not call.done():
            self._on_accepted()
            self._client.calls.answered = True
            if self._connectivity.away_since == away_since:
                self._connectivity.answered()

    async def _watch_answers(self) -> None:
        """Raises Unavailable, which ends the stream, if the router stops answering."""
        answer_s_max = self._client.calls.try_s
        while True:
            since = self._settlements.unanswered_since()
            left_s = answer_s_max if since is None else since + answer_s_max - time.monotonic()
            if left_s <= 0:
                raise Unavailable(
                    f"Consume at {self._client.calls.address}: no answer to a message in {answer_s_max:g} s"
                )
            await asyncio.sleep(left_s)

    def _raise(self, errors: BaseExceptionGroup[BaseException], began: float) -> NoReturn:
        expected, unexpected = errors.split((WindrowError, aio.AioRpcError))
        if expected is None or unexpected is not None:
            raise only_cause(errors) from None
        # Errors that come together have one cause: raise any of them.
        cause = expected.exceptions[0]
        if isinstance(cause, aio.AioRpcError):
            raise self._client.calls.stream_error("Consume", cause, spent_s=time.monotonic() - began) from cause
        raise cause from None

    async def _pause(self, pause_s: float) -> None:
        """Sleeps for `pause_s`, or until the stream is closed and nothing remains to be sent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closing.wait()
                await self._settlements.idle.wait()


def only_cause(error: BaseException) -> BaseException:
    """Unwraps an exception group that holds a single error, because that error is clearer by itself."""
    match error:
        case BaseExceptionGroup(exceptions=(cause,)):
            return only_cause(cast("BaseException", cause))
        case _:
            return error
