"""A shard's database that remembers what it was asked, and can be told to fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from shard.database import Database
from shard.errors import ShardUnavailable
from shard.vocabulary import ShardName

Run = tuple[bytes, Mapping[str, object]]


class Recorder(Database):
    """Remembers the statements, in the order in which they were begun, with the parameters of each."""

    def __init__(self, name: ShardName, dsn: str, *, connections: int = 4, for_books: bool = False) -> None:
        super().__init__(name, dsn, connections=connections, for_books=for_books)
        self.runs: list[Run] = []
        self._failing: dict[bytes, tuple[int, Exception]] = {}
        self._before: dict[bytes, Callable[[], Awaitable[object]]] = {}

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
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
        """How often the statement was run; `since`: not counting as many runs before."""
        return sum(run[0] == statement for run in self.runs[since:])

    def before(self, statement: bytes, act: Callable[[], Awaitable[object]]) -> None:
        """Does something just before the statement is run the next time."""
        self._before[statement] = act

    def fail(self, statement: bytes, *, after: int = 0, error: Exception | None = None) -> None:
        """From now on, but for the next few, as though the shard had gone away before it was asked, or with this."""
        self._failing[statement] = after, error or ShardUnavailable(self.name, "the test says so")

    def fail_no_more(self) -> None:
        self._failing.clear()
