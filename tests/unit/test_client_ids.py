"""Job ids: their form and their order. No two ids are equal."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
import uuid

import pytest

from windrow import ids, uuid7


def test_an_id_is_a_canonical_uuid_of_version_7() -> None:
    for _ in range(1000):
        text = uuid7()
        parsed = uuid.UUID(text)
        assert str(parsed) == text
        assert parsed.version == 7
        assert parsed.variant == uuid.RFC_4122


def test_an_id_tells_when_it_was_made() -> None:
    before = time.time()
    made = ids.made_at(uuid7())
    assert before - 0.002 <= made <= time.time() + 0.002


def test_the_ids_of_a_batch_are_always_the_same_in_order_and_of_its_time() -> None:
    batch, other = uuid7(), uuid7()
    made = [ids.nth_id(batch, n) for n in (0, 1, 255, 256, 2**32 - 1)]
    assert made == sorted(made)
    assert made == [ids.nth_id(batch, n) for n in (0, 1, 255, 256, 2**32 - 1)]
    assert not {*made, *(ids.nth_id(other, n) for n in range(5))}.intersection({batch, other})
    assert ids.nth_id(other, 1) != made[1]
    for text in made:
        parsed = uuid.UUID(text)
        assert (str(parsed), parsed.version, parsed.variant) == (text, 7, uuid.RFC_4122)
        assert ids.made_at(text) == ids.made_at(batch)
    for n in (-1, 2**32):
        with pytest.raises(ValueError, match="n must be 0 to 4,294,967,295"):
            ids.nth_id(batch, n)


@pytest.mark.parametrize("text", ["", "x", "6f2f1c1e-5c4f-4b7e-9d3a-1c2d3e4f5a6b"])
def test_what_is_no_uuid7_has_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="not a UUIDv7"):
        ids.made_at(text)


def test_ids_sort_in_the_order_they_were_made() -> None:
    made = [uuid7() for _ in range(50_000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_ids_go_on_growing_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    last = uuid7()
    monkeypatch.setattr(ids, "time_ns", lambda: 1_000_000_000_000_000_000)
    made = [uuid7() for _ in range(1000)]
    assert [last, *made] == sorted([last, *made])
    assert ids.made_at(made[-1]) == pytest.approx(ids.made_at(last), abs=0.002)


def test_a_millisecond_that_is_used_up_borrows_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns() + 3_600_000_000_000
    monkeypatch.setattr(ids, "_current", ids._current)
    monkeypatch.setattr(ids, "_ms", ids._ms)
    monkeypatch.setattr(ids, "time_ns", lambda: now)
    # The worst case: the highest first value and the largest steps.
    monkeypatch.setattr(secrets, "randbits", lambda bits: (1 << bits) - 1)
    made = [uuid7() for _ in range(100_000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert all(uuid.UUID(text).version == 7 and uuid.UUID(text).variant == uuid.RFC_4122 for text in made[::1000])
    room = [len(list(same)) for _, same in itertools.groupby(made, key=lambda text: text[:13])]
    assert room[:-1] == [32769] * 3


@pytest.mark.parametrize("lock_free", [True, False])
def test_threads_make_different_ids_each_in_order(monkeypatch: pytest.MonkeyPatch, lock_free: bool) -> None:
    monkeypatch.setattr(ids, "_LOCK_FREE", lock_free)
    made: list[list[str]] = [[] for _ in range(8)]
    start = threading.Barrier(len(made))

    def make(into: list[str]) -> None:
        start.wait()
        into.extend(uuid7() for _ in range(5000))

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(into == sorted(into) for into in made)
    assert len({text for into in made for text in into}) == 40_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_ids_of_its_own_even_if_the_lock_was_held() -> None:
    uuid7()
    reading, writing = os.pipe()
    with ids._lock:
        child = os.fork()
        if child == 0:
            os.write(writing, "".join(uuid7() for _ in range(100)).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    theirs = [text[at : at + 36] for at in range(0, len(text), 36)]
    assert len(theirs) == 100
    assert not {uuid7() for _ in range(100)} & set(theirs)
