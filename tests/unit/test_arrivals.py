"""Counts the bytes of a connection that a router has processed: the count is never too high, and never stays far
behind."""

from __future__ import annotations

from router.gate.arrivals import Arrivals

PEER = "ipv4:127.0.0.1:1"
# The bytes of a call's metadata, which are not counted.
METADATA_BYTES = 400


def call(arrivals: Arrivals, count: int) -> None:
    """Makes a call with a request of `count` bytes."""
    began = arrivals.begin(PEER)
    arrivals.received(PEER, began, count)
    arrivals.end(PEER, began)


def test_the_count_of_a_connection_that_has_no_calls_catches_up_at_once() -> None:
    arrivals = Arrivals()
    call(arrivals, 100)
    arrivals.catch_up({PEER: 100 + METADATA_BYTES})
    assert arrivals.done[PEER] == 100 + METADATA_BYTES


def test_the_count_of_a_connection_that_always_has_calls_catches_up_when_those_of_then_have_ended() -> None:
    arrivals = Arrivals()
    first = arrivals.begin(PEER)
    arrivals.received(PEER, first, 100)
    arrivals.catch_up({PEER: 100 + METADATA_BYTES})
    second = arrivals.begin(PEER)
    arrivals.received(PEER, second, 30)
    assert arrivals.done[PEER] == 130
    arrivals.end(PEER, first)
    assert arrivals.done[PEER] == 130 + METADATA_BYTES


def test_no_byte_counts_as_done_with_while_a_call_goes_on_that_may_hold_it() -> None:
    arrivals = Arrivals()
    unfinished = arrivals.begin(PEER)
    for received in (1_000_000, 2_000_000, 3_000_000):
        arrivals.catch_up({PEER: received})
        call(arrivals, 10)
    assert arrivals.done[PEER] == 30
    arrivals.end(PEER, unfinished)
    # The count reaches the first of the three goals. The other two goals were ignored, because a connection has at most
    # one goal at a time.
    assert arrivals.done[PEER] == 1_000_030


def test_a_request_of_which_a_part_had_come_is_not_counted_twice() -> None:
    arrivals = Arrivals()
    early = arrivals.begin(PEER)
    # Half of the call's request has come.
    arrivals.catch_up({PEER: 500})
    arrivals.received(PEER, early, 1_000)
    arrivals.end(PEER, early)
    assert arrivals.done[PEER] == 1_000


def test_catching_up_never_lowers_the_count() -> None:
    arrivals = Arrivals()
    call(arrivals, 1_000)
    arrivals.catch_up({PEER: 900})
    assert arrivals.done[PEER] == 1_000


def test_connections_that_are_gone_are_forgotten_once_their_calls_have_ended() -> None:
    arrivals = Arrivals()
    began = arrivals.begin(PEER)
    arrivals.received(PEER, began, 10)
    arrivals.forget(set())
    assert arrivals.done == {PEER: 10}
    arrivals.end(PEER, began)
    arrivals.forget(set())
    assert (arrivals.done, arrivals.inside) == ({}, {})
