"""A bounded number of sessions with one server. The caller that has waited for the longest time gets the next session.

Knows no statements and no server: `connect` makes a session, and tries until a try succeeds. A session that was closed,
has an open transaction, or is old is replaced by a new session when it is returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable

from psycopg.pq import TransactionStatus

from shard.errors import ShardUnavailable
from shard.postgres.session import Session
from shard.vocabulary import ShardName

# A server keeps memory for each session, and frees it only when the session ends. Each session ends a little earlier
# than this, so that not all sessions end at the same time.
_AGE_S_MAX = 3600.0
_WAITING_MAX = 1000
_CLOSED = "this process has closed its connections to it"


class SessionPool:
    """Keeps `sessions_min` sessions, and makes more, up to `sessions_max`, when callers wait."""

    def __init__(
        self, shard: ShardName, connect: Callable[[], Awaitable[Session]], *, sessions_min: int, sessions_max: int
    ) -> None:
        # Every session, idle or in use, until it is replaced.
        self.sessions: set[Session] = set()
        self._shard = shard
        self._connect = connect
        self._min = sessions_min
        self._max = sessions_max
        # The idle sessions. The session that was returned last is used first. No caller waits while a session is idle.
        self._idle: list[Session] = []
        self._waiting: deque[asyncio.Future[Session]] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        # How many sessions the tasks in `_connecting` still have to make. A task remains in `_connecting` for a moment
        # after it has made its session.
        self._to_come = 0
        self._closed = False

    def open(self) -> None:
        """Starts to connect."""
        self._fill()

    async def connected(self) -> None:
        """Waits until every session that is being made is ready."""
        while self._connecting:
            await asyncio.wait(self._connecting)

    async def close(self) -> None:
        """Closes the idle sessions now, and the sessions in use when they are returned."""
        self._closed = True
        self.refuse_waiting(_CLOSED)
        connecting = list(self._connecting)
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        self.replace_all()

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    async def take(self, *, wait_s: float) -> Session:
        """Returns a session that only the caller uses until it calls `give_back`. Raises ShardUnavailable if no session
        is free within `wait_s`, or if the pool refuses the callers that wait."""
        if self._idle:
            return self._idle.pop()
        if self._closed:
            raise ShardUnavailable(self._shard, _CLOSED)
        if len(self._waiting) >= _WAITING_MAX:
            raise ShardUnavailable(self._shard, "too many calls are waiting for a connection")
        waiter: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._fill()
        try:
            async with asyncio.timeout(wait_s):
                return await waiter
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(waiter)
            elif waiter.exception() is None:
                # The waiter got a session just before the error, so give that session back.
                self.give_back(waiter.result())
            if isinstance(error, TimeoutError):
                raise ShardUnavailable(self._shard, f"no connection within {wait_s:g} s") from error
            raise

    def give_back(self, session: Session) -> None:
        """Returns a session that the caller took."""
        if (
            session.pgconn.transaction_status == TransactionStatus.IDLE
            and asyncio.get_running_loop().time() < session.replace_at_s
        ):
            self._hand_out(session)
        else:
            self._discard(session)

    def take_all_idle(self) -> list[Session]:
        """Takes all idle sessions."""
        idle, self._idle = self._idle, []
        return idle

    def replace_all(self) -> None:
        """Replaces the idle sessions by new sessions now, and the sessions in use when they are returned."""
        for session in self.sessions:
            session.replace_at_s = 0.0
        for session in self.take_all_idle():
            self._discard(session)

    def refuse_waiting(self, why: str) -> None:
        """Lets the callers that wait for a session fail now."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(ShardUnavailable(self._shard, why))

    def _hand_out(self, session: Session) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(session)
                return
        self._idle.append(session)

    def _discard(self, session: Session) -> None:
        self.sessions.discard(session)
        session.discard()
        self._fill()

    def _fill(self) -> None:
        """Makes the sessions that are missing."""
        if self._closed:
            return
        there = len(self.sessions)
        missing = max(self._min - there, min(len(self._waiting), self._max - there))
        for _ in range(missing - self._to_come):
            self._to_come += 1
            task = asyncio.create_task(self._make())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _make(self) -> None:
        try:
            session = await self._connect()
        finally:
            self._to_come -= 1
        session.replace_at_s = asyncio.get_running_loop().time() + _AGE_S_MAX * random.uniform(0.9, 1.0)
        self.sessions.add(session)
        self._hand_out(session)
