"""Checks two things. If a shard's database went back in time, routers refuse the shard until an operator accepts the
loss. And routers refuse no other shard.

The check covers only the time when three conditions held: all routers knew of marks that the backup lacks, the backup's
database could be reached, and nobody had begun to accept the loss. There was no other fault in this time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from proof.checker.evidence import Evidence, Placed, Restored, Violation
from proof.history import Call, Outcome, Verb
from shard.placement.slots import slot_of
from shard.vocabulary import OrgId

REASON = "has lost history"
_ASKED = frozenset({Verb.ENQUEUE, Verb.DEQUEUE, Verb.ACK, Verb.NACK, Verb.EXTEND, Verb.RELEASE})


def check(evidence: Evidence) -> Iterator[Violation]:
    restored = evidence.restored
    if restored is None:
        return
    shard = restored.shard
    if not any(REASON in one.error for one in restored.told):
        yield _violation(f"no router said that shard {shard} {REASON}")
    served = sum(one.reachable for one in restored.told)
    if served:
        yield _violation(f"routers said {served} times that shard {shard} can be used, which {REASON}")
    there, elsewhere = _orgs(evidence, restored)
    history = evidence.history
    for enqueue in history.enqueues:
        call = enqueue.call
        # A duplicate proves nothing: the router may have asked a former owner, and not this shard.
        stored = enqueue.answered is not None and not enqueue.duplicate
        if stored and call.org in there and _within(restored, call.began_s, call.ended_s):
            yield _violation(f"job {enqueue.job} of {call.org} was stored on {shard}, which {REASON}")
    for delivery in history.deliveries:
        if delivery.call.org in there and _within(restored, delivery.call.began_s, delivery.received_s):
            yield _violation(f"job {delivery.lease.job} of {delivery.call.org} came from {shard}, which {REASON}")
    for call in history.calls:
        if call.org in elsewhere and _was_refused(call) and _within(restored, call.began_s, call.ended_s):
            yield _violation(
                f"the {call.verb} of {call.org} by {call.client} was UNAVAILABLE while {shard} was refused, where the "
                "org has never been"
            )


def _was_refused(call: Call) -> bool:
    return call.verb in _ASKED and call.outcome is not Outcome.OK and call.code == "UNAVAILABLE"


def _within(restored: Restored, began_s: float, ended_s: float | None) -> bool:
    return ended_s is not None and restored.back_s <= began_s and ended_s < restored.accepting_s


def _orgs(evidence: Evidence, restored: Restored) -> tuple[set[str], set[str]]:
    """Returns the orgs that lived on the shard until somebody began to accept the loss, and the orgs that were never on
    the shard."""
    by_slot: defaultdict[int, list[Placed]] = defaultdict(list)
    for now in evidence.placed:
        for slot in now.slots:
            by_slot[slot].append(now)
    there, elsewhere = set[str](), set[str]()
    for org in {call.org for call in evidence.history.calls}:
        by_hash = slot_of(OrgId(org))
        own = by_slot.get(evidence.pins.get(org, by_hash), [])
        # If the org got its own slot only after the database was replaced, use the slot of its hash.
        slots = own if own and own[0].at_s < restored.swapped_s else by_slot.get(by_hash, [])
        before = [now for now in slots if now.at_s < restored.swapped_s]
        meanwhile = [now for now in slots if restored.swapped_s <= now.at_s < restored.accepting_s]
        if before and not meanwhile and list(before[-1].reads) == [restored.shard]:
            there.add(org)
        if before and not any(restored.shard in now.reads for now in (*own, *by_slot.get(by_hash, []))):
            elsewhere.add(org)
    return there, elsewhere


def _violation(what: str) -> Violation:
    return Violation(invariant="restore", what=what)
