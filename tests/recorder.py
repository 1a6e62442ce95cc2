"""A shard's database that records its statements, and can be made to fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from shard.errors import ShardUnavailable
from shard.postgres.pool import SHORT_LOCK_WAIT_S, Database, Rows
from shard.vocabulary import ShardName

Run = tuple[bytes, Mapping[str, object]]


class Recorder(Database):
    """Records the statements in the order in which they began, with their parameters."""

    def __init__(
        self,
        name: ShardName,
        dsn: str,
        *,
        connections: int = 4,
        may_scan: bool = False,
        short_lock_wait_s: float = SHORT_LOCK_WAIT_S,
    ) -> None:
        super().__init__(name, dsn, connections=connections, may_scan=may_scan, short_lock_wait_s=short_lock_wait_s)
        self.runs: list[Run] = []
        self._failing: dict[bytes, tuple[int, Exception]] = {}
        self._before: dict[bytes, Callable[[], Awaitable[object]]] = {}

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> Rows:
        self.runs.append((statement, dict(parameters)))
        if statement in self._before:
            await self._before.pop(statement)()
        if statement in self._failing:
            after, error = self._failing[statement]
            if after == 0:
                raise error
            self._failing[statement] = after - 1, error
        return await super().run(statement, parameters)

    def last(self, statement: bytes) -> Run:
        return next(run for run in reversed(self.runs) if run[0] == statement)

    def count(self, statement: bytes, *, since: int = 0) -> int:
        """Returns how often the statement was run. Does not count the first `since` recorded statements."""
        return sum(run[0] == statement for run in self.runs[since:])

    def before(self, statement: bytes, act: Callable[[], Awaitable[object]]) -> None:
        """Calls a function just before the statement is run the next time."""
        self._before[statement] = act

    def fail(self, statement: bytes, *, after: int = 0, error: Exception | None = None) -> None:
        """Lets the statement run `after` times. After that, each run fails with this error. The default error says that
        the shard does not answer."""
        self._failing[statement] = after, error or ShardUnavailable(self.name, "the test says so")

    def fail_no_more(self) -> None:
        self._failing.clear()
