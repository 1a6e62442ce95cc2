"""Calls that share no statement with others, and take their turns all the same: one org's leave others theirs (I4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from shard.vocabulary import OrgId


class Alone(NamedTuple):
    """A call for a Coalescer, which is an act by itself. `org`: None for what is nobody's."""

    org: OrgId | None
    weight: int
    act: Callable[[], Awaitable[Any]]


async def one_by_one(calls: Sequence[Alone]) -> list[Any]:
    """Each call's result or error, in their order."""
    answers: list[Any] = []
    for call in calls:
        try:
            answers.append(await call.act())
        except Exception as error:  # noqa: BLE001 - it is the caller's to handle
            answers.append(error)
    return answers
