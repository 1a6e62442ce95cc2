"""Dicts that remember a bounded number of things."""

from __future__ import annotations

from shard.bounded import make_room


def test_a_full_dict_forgets_its_oldest_entries_a_tenth_at_a_time() -> None:
    remembered = dict.fromkeys(range(100))
    make_room(remembered, 100)
    assert list(remembered) == list(range(10, 100))
    make_room(remembered, 100)
    assert len(remembered) == 90, "there is room"


def test_a_dict_with_room_for_few_entries_forgets_one() -> None:
    remembered = {"a": 1, "b": 2}
    make_room(remembered, 2)
    assert remembered == {"b": 2}
