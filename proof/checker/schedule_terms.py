"""Computes from operators' calls the instants of a schedule, the terms that may have been in force, and the pauses of
the schedule.

A call took effect at some moment between its beginning and its answer. If it was not answered, it may have taken effect
at any later time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from proof.checker.evidence import CLOCK_US, Change, ChangeKind, Schedule, Terms

FOREVER_US = 1 << 62
# A shard keeps at least this many of the newest runs, and may forget older ones.
RUNS_KEPT = 20


def find_instants(schedule: Schedule, created_us: int) -> tuple[set[int], set[int]]:
    """Returns two sets: the instants that must have been decided, and the instants that may have been decided."""
    ends_us = schedule.ends_us
    # For each set of terms: the earliest time at which the terms may have come into force, and the time from which they
    # certainly were in force.
    steps = [(created_us, created_us, schedule.terms)]
    must, may = set[int](), set[int]()
    open_us = ends_us
    # If all terms have the same timing, the instants are the same, no matter which terms were in force.
    is_steady = all(terms.every_us == schedule.terms.every_us for _, _, terms in schedule.alterations)
    for began_us, ended_us, terms in () if is_steady else schedule.alterations:
        if ended_us is None:
            open_us = min(open_us, began_us)
            may |= multiples(terms, began_us, ends_us)
        else:
            steps.append((began_us, ended_us, terms))
    for (began_us, ended_us, terms), (next_began_us, next_ended_us, _) in pairwise(
        [*steps, (ends_us, ends_us, schedule.terms)]
    ):
        must |= multiples(terms, ended_us, min(next_began_us, open_us))
        may |= multiples(terms, began_us, min(next_ended_us + 1, ends_us))
    return must, may


def multiples(terms: Terms, after_us: int, before_us: int) -> set[int]:
    periods = (after_us - terms.offset_us) // terms.every_us + 1
    return set(range(terms.offset_us + periods * terms.every_us, before_us, terms.every_us))


def in_force(schedule: Schedule, at_us: int) -> list[Terms]:
    """Returns the terms that may have been in force at this time or later."""
    found = [schedule.terms]
    for _, ended_us, terms in schedule.alterations:
        if ended_us is not None and ended_us < at_us - CLOCK_US:
            found.clear()
        found.append(terms)
    return [*found, *(terms for _, ended_us, terms in schedule.alterations if ended_us is None)]


def between(schedule: Schedule, began_us: int, ended_us: int | None) -> list[Terms]:
    """Returns the terms that may have been in force when a call was executed that began at `began_us` and ended at
    `ended_us`."""
    found, unanswered = [schedule.terms], list[Terms]()
    for alter_began_us, alter_ended_us, terms in schedule.alterations:
        if ended_us is not None and alter_began_us > ended_us:
            break
        if alter_ended_us is None:
            unanswered.append(terms)
        elif alter_ended_us < began_us:
            found.clear()
        if alter_ended_us is not None:
            found.append(terms)
    return [*found, *unanswered]


def certain_pauses(changes: Sequence[Change]) -> list[tuple[int, int]]:
    """Returns the beginning and the end of each time in which a schedule or a workflow was certainly paused. A cancel
    of a workflow also ends its pause."""
    pauses: list[tuple[int, int]] = []
    since_us: int | None = None
    for one in changes:
        if one.kind is ChangeKind.PAUSE and since_us is None:
            since_us = one.ended_us
        elif one.kind in {ChangeKind.RESUME, ChangeKind.CANCEL}:
            if since_us is not None:
                pauses.append((since_us + CLOCK_US, one.began_us - CLOCK_US))
            since_us = None
            if one.ended_us is None:
                return pauses
    return pauses if since_us is None else [*pauses, (since_us + CLOCK_US, FOREVER_US)]


def latest_us(changes: Sequence[Change], begin: ChangeKind, end: ChangeKind) -> int:
    """Returns the latest time at which a state, such as a pause, may have been in force. Calls of the kind `begin`
    begin this state, and calls of the kind `end` end it. If `begin` and `end` are equal, returns the latest time at
    which a call of this kind may have been executed. Returns −1 if there was no call of the kind `begin`."""
    until_us = -1
    for one in changes:
        if one.kind is end and one.ended_us is not None and until_us == FOREVER_US:
            until_us = one.ended_us
        if one.kind is begin:
            if one.ended_us is None:
                return FOREVER_US
            until_us = one.ended_us if begin is end else FOREVER_US
    return until_us
