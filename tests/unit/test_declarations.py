"""How long a worker tries to declare its schedules."""

from __future__ import annotations

from typing import Any, cast

import pytest

from windrow import (
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    NewJob,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    RouterError,
    Schedule,
    Unavailable,
    WindrowError,
)
from windrow.declarations import Declarations


def having(error: WindrowError, *, reason: str = "", retry_after: float | None = None) -> WindrowError:
    error.reason, error.retry_after = reason, retry_after
    return error


class Refusing:
    """A client whose first call fails."""

    def __init__(self, error: WindrowError) -> None:
        self.errors = [error]
        self.declared: list[str] = []

    async def declare_schedules(self, declared: list[tuple[str, Any, Any]], **_: object) -> list[str]:
        if self.errors:
            raise self.errors.pop()
        self.declared += [name for name, _, _ in declared]
        return []


async def declare(error: WindrowError) -> list[str]:
    client = Refusing(error)
    declarations = Declarations(client=cast("Client", client), declared_by="app", removes=False)
    declarations.add("tick", Schedule(every=1), NewJob("q", "tick"))
    await declarations.keep()
    return client.declared


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("away"),
        DeadlineExceeded("late"),
        RouterError("INTERNAL"),
        having(ResourceExhausted("full"), reason="ROUTER_FULL", retry_after=0.001),
        having(FailedPrecondition("a wrong database"), reason="MISCONFIGURED"),
    ],
)
async def test_a_worker_declares_its_schedules_again_after_what_may_pass(
    error: WindrowError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windrow.declarations._PAUSE_FIRST_S", 0.001)
    assert await declare(error) == ["tick"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "error",
    [
        having(ResourceExhausted("10,000 schedules"), reason="TOO_MANY_SCHEDULES"),
        having(FailedPrecondition("no"), reason="QUEUE_NOT_EMPTY"),
        PermissionDenied("the key lacks the scope admin"),
        NotFound("no"),
    ],
)
async def test_a_worker_whose_schedules_are_refused_for_good_ends(
    error: WindrowError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windrow.declarations._PAUSE_FIRST_S", 0.001)
    with pytest.raises(type(error)) as raised:
        await declare(error)
    assert raised.value is error
