"""The size of a worker's messages, counted by the bytes that they have on the wire."""

from __future__ import annotations

import pytest

from windrow import uuid7
from windrow.failures import Failure
from windrow.jobs import Job
from windrow.leases import Connectivity, HeldLease, Leases
from windrow.outcomes import Action, Done, Extended, Failed, Released, Snoozed, acks_of
from windrow.settlements import _BYTES_MAX, ENTRIES_MAX, Backoff, Settlements, _Entry
from windrow.v1 import queue_pb2

LONG = 2**17
ACTIONS: dict[str, Action] = {
    "nothing": Done(),
    "a result": Done(result=bytes(2**16)),
    "a short text": Failed(failure=Failure(type="T", message="no"), retry_after_s=3650 * 86400.0 - 1e-9),
    "a text of many bytes": Failed(failure=Failure(type="é" * LONG, message="€" * LONG, stack="🌾" * LONG)),
    "half characters": Failed(failure=Failure(message="\ud800" * LONG, stack="\0" * LONG)),
    "an extend": Extended(),
    "a release": Released(),
    "a snooze": Snoozed(after_s=3650 * 86400.0 - 1e-9, reason="€" * 341),
}


def held(lease: bytes) -> HeldLease:
    return HeldLease(Job(lease=lease, id=uuid7()), 0.0, 30.0)


@pytest.mark.parametrize("lease_bytes", [1, 46, 255])
@pytest.mark.parametrize("said", ACTIONS)
def test_an_entry_counts_for_at_least_its_bytes_and_not_for_many_more(said: str, lease_bytes: int) -> None:
    entry = _Entry(held(b"l" * lease_bytes), ACTIONS[said])
    request = queue_pb2.ConsumeRequest()
    entry.write(request)
    assert request.ByteSize() <= entry.size <= request.ByteSize() + 32


@pytest.mark.parametrize("lengths", [[], [1], [125, 126, 127, 128, 255], [22] * 1000, [22, 46] * 9])
def test_acks_written_as_bytes_are_what_the_generated_code_writes(lengths: list[int]) -> None:
    leases = [bytes([at % 256]) * length for at, length in enumerate(lengths)]
    generated = queue_pb2.ConsumeRequest(acks=[queue_pb2.Ack(lease=lease) for lease in leases])
    assert acks_of(leases) == generated.SerializeToString()


async def test_a_message_of_long_failures_has_at_most_4_mib_and_as_many_as_fit() -> None:
    nothing = Leases(
        worker="w",
        window_s=30,
        extend=lambda leases: None,
        on_waited=lambda held: None,
        on_lost=lambda held: None,
    )
    settlements = Settlements(nothing, Connectivity("w"), backoff=Backoff(1, 1))
    for _ in range(ENTRIES_MAX):
        settlements.settle(held(uuid7().encode()), ACTIONS["a text of many bytes"])
    message = queue_pb2.ConsumeRequest()
    assert settlements.fill(message)
    assert message.ByteSize() <= _BYTES_MAX
    assert message.ByteSize() > _BYTES_MAX * 0.9
