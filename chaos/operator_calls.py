"""Makes the calls of operators: repeats each call until it is answered, and records each try that a router may have
executed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from proof.clients import calls
from proof.history import Outcome

TRY_S = 2.0
PAUSE_S = 0.3

_Stub = TypeVar("_Stub")


class OperatorCalls(Generic[_Stub]):
    """The calls of one operator, whose time ends at `end_s`."""

    def __init__(self, stubs: Sequence[_Stub], luck: random.Random, *, end_s: float) -> None:
        self._stubs = stubs
        self._luck = luck
        self._end_s = end_s
        # How many tries were answered NOT_FOUND.
        self.denied = 0

    def stub(self) -> _Stub:
        return self._luck.choice(self._stubs)

    async def until_answered(
        self,
        send: Callable[[_Stub], Any],
        record: Callable[[int, int | None, Any], None] = lambda _began_us, _ended_us, _answer: None,
        *,
        until_s: float | None = None,
    ) -> Any:
        """Returns the answer. Returns None if there was no answer until `until_s`, which is by default the end of the
        operator's time. Calls `record` with the beginning, the end and the answer of each try that a router may have
        executed."""
        while True:
            began_us = now_us()
            try:
                answer = await send(self.stub())
            except grpc.aio.AioRpcError as error:
                outcome, _ = calls.outcome_of(error)
                self.denied += error.code() is grpc.StatusCode.NOT_FOUND
                if outcome is Outcome.UNKNOWN:
                    record(began_us, None, None)
            else:
                record(began_us, now_us(), answer)
                return answer
            if time.time() >= (self._end_s if until_s is None else until_s):
                return None
            await asyncio.sleep(PAUSE_S)


async def is_created(creating: Awaitable[object]) -> bool:
    """Returns True if a router has created the object, or says that the object exists already. Pauses after a failure.
    Raises AioRpcError if the request is not valid. Such a request would never succeed, however often it is repeated,
    and the run would have less load than its report says."""
    try:
        await creating
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise
        await asyncio.sleep(PAUSE_S)
        # If the object exists already, an earlier try whose answer was lost has created it.
        return error.code() is grpc.StatusCode.ALREADY_EXISTS
    return True


def now_us() -> int:
    return time.time_ns() // 1000
