"""Tells from the journal of the catalog (proof/journal.py) when an org was moving. Pure."""

from __future__ import annotations

from collections import defaultdict

from proof.checker.evidence import CLOCK_S, Evidence
from proof.history import Call
from shard.placement.slots import slot_of
from shard.vocabulary import OrgId


class Moves:
    """Knows when the jobs of an org could be on two shards."""

    def __init__(self, evidence: Evidence) -> None:
        self._pins = evidence.pins
        self._slack_s = CLOCK_S + evidence.history.drift_s
        # For each slot the times at which its moves began and ended. Infinity: the move has not ended.
        self._spans: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for now in evidence.placed:
            for slot in now.slots:
                spans = self._spans[slot]
                is_open = bool(spans) and spans[-1][1] == float("inf")
                if len(now.reads) > 1 and not is_open:
                    spans.append((now.at_s, float("inf")))
                elif len(now.reads) == 1 and is_open:
                    spans[-1] = (spans[-1][0], now.at_s)

    def may_move(self, call: Call) -> bool:
        """Returns whether the org of the call may have been moving during the call. Considers the slot of the org's
        hash and also the org's own slot, because the org may have got its own slot during the test run."""
        by_hash = slot_of(OrgId(call.org))
        slots = {by_hash, self._pins.get(call.org, by_hash)}
        ended_s = float("inf") if call.ended_s is None else call.ended_s
        return any(
            from_s - self._slack_s <= ended_s and call.began_s <= until_s + self._slack_s
            for slot in slots
            for from_s, until_s in self._spans.get(slot, ())
        )
