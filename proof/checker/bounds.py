"""Checks how much a single fault may affect clients, and how large a router may grow (I9).

While a router restarts in an orderly way (SIGTERM), clients see no other error than UNAVAILABLE. A locked row delays
only calls of the org to which the row belongs (I4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from proof.checker.evidence import Alone, Evidence, Violation
from proof.clients.calls import TRY_S
from proof.history import Call, Outcome, Verb

# SETTLED_…: the error in the answer to one message of a stream. STREAM_ENDED: the stream ended before the message was
# answered.
_RESTART_CODES = frozenset({"UNAVAILABLE", "SETTLED_UNAVAILABLE", "STREAM_ENDED"})
# For each verb, the codes that a call may also get for another reason than the restart of a router.
_OWN_CODES: Mapping[Verb, frozenset[str]] = {
    # The consumer gave its stream a deadline, or wrote to the stream after the stream had ended.
    Verb.CONSUME: frozenset({"DEADLINE_EXCEEDED", "WRITE_FAILED"}),
    # The client gave up the call very early, or the lease or the workflow had ended.
    Verb.ADD: frozenset({"DEADLINE_EXCEEDED", "FAILED_PRECONDITION"}),
    # The node may have ended without a signal.
    Verb.SIGNAL: frozenset({"FAILED_PRECONDITION"}),
}


def check(evidence: Evidence) -> Iterator[Violation]:
    for alone in evidence.alone:
        match alone.fault:
            case "restart-router":
                yield from _restart(alone, evidence)
            case "lock-rows":
                yield from _locked(alone, evidence)
            case _:
                pass
    yield from _memory(evidence)


def _restart(alone: Alone, evidence: Evidence) -> Iterator[Violation]:
    for call in evidence.history.calls:
        if call.outcome is Outcome.OK or call.ended_s is None or not alone.began_s <= call.ended_s <= alone.ended_s:
            continue
        if call.code == "DEADLINE_EXCEEDED" and evidence.answer_s_max >= TRY_S:
            # The machine stalled for so long that clients gave up the call. Nothing else delayed the call.
            continue
        if call.code not in _RESTART_CODES | _OWN_CODES.get(call.verb, frozenset()):
            yield Violation(
                invariant="restart", what=f"{_described(call)} ended with {call.code} while a router restarted in order"
            )


def _locked(alone: Alone, evidence: Evidence) -> Iterator[Violation]:
    for call in evidence.history.calls:
        if call.verb is not Verb.ACK or call.org in alone.orgs or call.ended_s is None:
            continue
        waited_s = min(call.ended_s, alone.ended_s) - call.began_s
        if call.began_s >= alone.began_s and waited_s > evidence.answer_s_max:
            what = f"{_described(call)} waited {waited_s:.1f} s while rows of {', '.join(alone.orgs)} were locked"
            yield Violation(invariant="I4", what=what)


def _memory(evidence: Evidence) -> Iterator[Violation]:
    bound = evidence.resident_bytes_max
    if bound is None:
        return
    for pid, resident in evidence.resident_bytes.items():
        if resident > bound:
            what = f"router process {pid} had {resident / 2**20:,.0f} MiB resident, more than {bound / 2**20:,.0f} MiB"
            yield Violation(invariant="I9", what=what)


def _described(call: Call) -> str:
    return f"the {call.verb} of {call.org} by {call.client}"
