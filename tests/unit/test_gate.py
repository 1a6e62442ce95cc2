"""The way into a router: no org fills it, and whoever left is not counted."""

from __future__ import annotations

import pytest

from router.calls import CALLS_MAX, STREAMS_MAX, Gate
from router.status import RouterFull
from router.tracing import Tracing


@pytest.fixture
def gate() -> Gate:
    return Gate(Tracing())


def enter(gate: Gate, org: str, *, at_most: int = CALLS_MAX) -> int:
    """As many calls as get in."""
    for count in range(at_most):
        try:
            gate.enter(org)
        except RouterFull:
            return count
    return at_most


def test_one_org_has_half_of_the_calls_and_others_get_in(gate: Gate) -> None:
    assert enter(gate, "busy") == CALLS_MAX // 2
    with pytest.raises(RouterFull, match="takes 4,000 calls at a time, and never more of one org than"):
        gate.enter("busy")
    assert enter(gate, "other") == CALLS_MAX // 4
    gate.leave("busy")
    assert enter(gate, "third", at_most=100) == 100


def test_calls_that_wait_for_jobs_leave_their_places_to_others(gate: Gate) -> None:
    assert enter(gate, "busy") == CALLS_MAX // 2
    with gate.waiting("busy"):
        assert enter(gate, "busy") == 1
    # It is inside again, whether or not there is room.
    with pytest.raises(RouterFull):
        gate.enter("busy")
    gate.leave("busy")
    gate.leave("busy")
    assert enter(gate, "busy") == 1


def test_one_org_has_half_of_the_streams(gate: Gate) -> None:
    streams = [gate.stream("busy") for _ in range(STREAMS_MAX // 2)]
    for stream in streams:
        stream.__enter__()
    with pytest.raises(RouterFull, match="takes 10,000 streams"), gate.stream("busy"):
        pass
    with gate.stream("other"):
        pass
    streams[0].__exit__(None, None, None)
    with gate.stream("busy"):
        pass
