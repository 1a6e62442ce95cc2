"""Tests of floors: up to which time each lane has been claimed."""

from __future__ import annotations

import pytest

from shard.queue import claim_floor
from shard.queue.claim_floor import GUARD_US, Floors
from shard.vocabulary import PRIORITIES, Claimed, JobId, Micros, QueueId, QueueName

A, B = QueueId(10), QueueId(20)
NOW = 2_000_000_000_000_000
LONG_AGO = NOW - 60_000_000


def taken(queue_id: QueueId, *, run_at: int, priority: int = 5, leased_at: int = NOW) -> tuple[QueueId, Claimed]:
    return queue_id, Claimed(
        id=JobId("01900000-0000-7000-8000-000000000001"),
        queue=QueueName("q"),
        kind="k",
        payload=b"",
        attributes=None,
        priority=priority,
        attempt=1,
        max_attempts=None,
        enqueued_at=Micros(run_at),
        run_at=Micros(run_at),
        trace=None,
        lease=1,
        leased_at=Micros(leased_at),
        deadline=Micros(leased_at + 1),
        expired=False,
    )


def floors_of(floors: Floors, *queues: QueueId) -> dict[tuple[int, int], int]:
    return {
        (queue, priority): reached
        for queue in queues
        for priority, reached in zip(PRIORITIES, floors.of(queue), strict=True)
    }


def use(floors: Floors, *queues: QueueId) -> None:
    for queue in queues:
        floors.of(queue)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the monotonic clock of the process. The returned list has one element, the time."""
    now = [1000.0]
    monkeypatch.setattr("shard.queue.claim_floor.time.monotonic", lambda: now[0])
    return now


def test_a_lane_begins_at_the_beginning_of_time() -> None:
    assert set(floors_of(Floors(), A).values()) == {0}


def test_a_claim_raises_the_floor_of_its_own_lane_only() -> None:
    floors = Floors()
    use(floors, A, B)
    floors.claimed([taken(A, run_at=LONG_AGO, priority=3)], arrivals=0)
    raised = {lane: at for lane, at in floors_of(floors, A, B).items() if at}
    assert raised == {(A, 3): LONG_AGO}


def test_a_floor_is_the_last_claimed_jobs_time() -> None:
    floors = Floors()
    use(floors, A)
    floors.claimed(
        [taken(A, run_at=LONG_AGO), taken(A, run_at=LONG_AGO + 5), taken(A, run_at=LONG_AGO + 3)], arrivals=0
    )
    assert floors_of(floors, A)[A, 5] == LONG_AGO + 5


def test_a_floor_trails_the_shards_time_by_the_guard() -> None:
    floors = Floors()
    use(floors, A)
    floors.claimed([taken(A, run_at=NOW - 1)], arrivals=0)
    assert floors_of(floors, A)[A, 5] == NOW - GUARD_US


def test_a_claim_never_lowers_a_floor_and_a_sweep_does() -> None:
    floors = Floors()
    use(floors, A)
    floors.claimed([taken(A, run_at=LONG_AGO + 5)], arrivals=0)
    floors.claimed([taken(A, run_at=LONG_AGO)], arrivals=0)
    assert floors_of(floors, A)[A, 5] == LONG_AGO + 5
    floors.swept([A], Micros(LONG_AGO + 9), {(A, 5): Micros(LONG_AGO - 7)}, arrivals=0)
    assert floors_of(floors, A)[A, 5] == LONG_AGO - 7


def test_a_sweep_puts_a_floor_at_the_lanes_first_row_and_never_nearer_to_now_than_the_guard() -> None:
    floors = Floors()
    use(floors, A, B)
    floors.claimed([taken(B, run_at=LONG_AGO)], arrivals=0)
    guarded = Micros(NOW - GUARD_US)
    # Priority 2 has a row that is due. Priority 3 has a row that is leased or scheduled. Nothing is known about the
    # other priorities.
    floors.swept([A], guarded, {(A, 2): Micros(LONG_AGO), (A, 3): Micros(NOW + 5), (B, 5): Micros(7)}, arrivals=0)
    found = floors_of(floors, A, B)
    assert found == {
        **{(A, p): guarded for p in PRIORITIES},
        (A, 2): LONG_AGO,
        **{(B, p): 0 for p in PRIORITIES},
        (B, 5): LONG_AGO,
    }


def test_floors_of_a_queue_that_nobody_uses_are_not_kept() -> None:
    floors = Floors()
    floors.claimed([taken(A, run_at=LONG_AGO)], arrivals=0)
    floors.swept([A], Micros(LONG_AGO), {}, arrivals=0)
    assert floors.to_sweep() == []
    assert floors_of(floors, A)[A, 5] == 0


def test_a_queue_out_of_use_is_forgotten_after_a_minute(clock: list[float]) -> None:
    floors = Floors()
    use(floors, A, B)
    floors.claimed([taken(A, run_at=LONG_AGO), taken(B, run_at=LONG_AGO)], arrivals=0)
    clock[0] += 59
    use(floors, B)
    clock[0] += 2
    assert floors.to_sweep() == [B]
    assert floors_of(floors, A, B) == {
        (queue, p): LONG_AGO if (queue, p) == (B, 5) else 0 for queue in (A, B) for p in PRIORITIES
    }


def test_the_number_of_queues_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_floor, "_QUEUES_MAX", 3)
    floors = Floors()
    for number in range(10):
        use(floors, QueueId(number))
    assert floors.to_sweep() == [QueueId(7), QueueId(8), QueueId(9)]


def test_what_arrives_from_another_shard_is_looked_for_from_the_beginning_of_time() -> None:
    floors = Floors()
    use(floors, A, B)
    floors.claimed([taken(A, run_at=LONG_AGO), taken(B, run_at=LONG_AGO)], arrivals=floors.arrivals)
    floors.arrived([A])
    assert floors_of(floors, A, B)[A, 5] == 0
    assert floors_of(floors, A, B)[B, 5] == LONG_AGO


def test_a_look_that_began_before_an_arrival_raises_no_floor_of_its_queue() -> None:
    floors = Floors()
    use(floors, A, B)
    before = floors.arrivals
    floors.arrived([A])
    floors.claimed([taken(A, run_at=LONG_AGO), taken(B, run_at=LONG_AGO)], arrivals=before)
    assert (floors_of(floors, A)[A, 5], floors_of(floors, B)[B, 5]) == (0, LONG_AGO)
    floors.swept([A, B], Micros(LONG_AGO + 9), {}, arrivals=before)
    assert (floors_of(floors, A)[A, 5], floors_of(floors, B)[B, 5]) == (0, LONG_AGO + 9)
    floors.claimed([taken(A, run_at=LONG_AGO)], arrivals=floors.arrivals)
    assert floors_of(floors, A)[A, 5] == LONG_AGO


def test_rows_that_a_claim_locked_in_vain_are_looked_for_from_where_it_began() -> None:
    floors = Floors()
    use(floors, A, B)
    floors.claimed([taken(A, run_at=LONG_AGO), taken(B, run_at=LONG_AGO)], arrivals=0)
    before = {A: list(floors.of(A))}
    # A concurrent claim skips the locked rows, and takes later rows. Another claim has not ended yet.
    floors.claimed([taken(A, run_at=LONG_AGO + 10), taken(A, run_at=LONG_AGO + 10, priority=1)], arrivals=0)
    floors.missed(before)
    floors.claimed([taken(A, run_at=LONG_AGO + 20), taken(B, run_at=LONG_AGO + 20)], arrivals=0)
    raised = {lane: at for lane, at in floors_of(floors, A, B).items() if at}
    assert raised == {(A, 5): LONG_AGO, (B, 5): LONG_AGO + 20}
    floors.claimed([taken(A, run_at=LONG_AGO + 30)], arrivals=1)
    assert floors.of(A)[4] == LONG_AGO + 30
