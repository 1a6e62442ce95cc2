"""Retry policies: when a nacked job runs again. Pure: the caller supplies the random number.

A policy is stored as JSON with a job or a queue: {"fixed": {"delay_us": n}} or
{"exponential": {"initial_us": n, "multiplier": x, "max_us": n, "jitter": x}}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import assert_never

from shard.vocabulary import MAX_ATTEMPTS_DEFAULT

_SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    delay_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    initial_us: int = _SECOND_US
    multiplier: float = 2.0
    max_us: int = 3600 * _SECOND_US
    # The random share of the delay, 0 to 1. It spreads the next runs of many jobs that failed at the same time.
    jitter: float = 0.1


Policy = Fixed | Exponential
DEFAULT: Policy = Exponential()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryAfter:
    delay_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkDead:
    reason: str


Fate = RetryAfter | MarkDead


def delay_us(policy: Policy, *, attempt: int, luck: float) -> int:
    """Returns the delay in microseconds between this attempt (counted from 1) and the next run. `luck`: a random number
    that is at least 0 and less than 1."""
    match policy:
        case Fixed():
            return policy.delay_us
        case Exponential():
            # The exponent is bounded, to prevent an overflow at attempt 1,000. The delay usually reaches max_us much
            # earlier.
            grown = policy.initial_us * policy.multiplier ** min(attempt - 1, 150)
            return round(min(grown, policy.max_us) * (1 + policy.jitter * (2 * luck - 1)))
        case _:
            assert_never(policy)


def fate(policy: Policy, *, attempt: int, max_attempts: int | None, luck: float) -> Fate:
    """Returns whether a job runs again or becomes dead after this attempt (counted from 1) was nacked. The returned
    delay applies only if the nack names no delay."""
    allowed = max_attempts or MAX_ATTEMPTS_DEFAULT
    if attempt >= allowed:
        return MarkDead(reason=f"out of attempts ({attempt} of {allowed})")
    return RetryAfter(delay_us=delay_us(policy, attempt=attempt, luck=luck))


def to_json(policy: Policy) -> str:
    match policy:
        case Fixed():
            return json.dumps({"fixed": {"delay_us": policy.delay_us}})
        case Exponential():
            values = {
                "initial_us": policy.initial_us,
                "multiplier": policy.multiplier,
                "max_us": policy.max_us,
                "jitter": policy.jitter,
            }
            return json.dumps({"exponential": values})
        case _:
            assert_never(policy)


def from_json(text: str | None) -> Policy:
    """Returns the policy that is stored with a job or a queue; DEFAULT if none is stored. Raises ValueError."""
    if text is None:
        return DEFAULT
    match json.loads(text):
        case {"fixed": {"delay_us": int(delay)}}:
            return Fixed(delay_us=delay)
        case {
            "exponential": {
                "initial_us": int(initial),
                "multiplier": multiplier,
                "max_us": int(cap),
                "jitter": jitter,
            }
        }:
            return Exponential(initial_us=initial, multiplier=float(multiplier), max_us=cap, jitter=float(jitter))
        case _:
            raise ValueError(f"not a retry policy: {text}")
