"""Checks I6: at all times every slot has one writer and at most one owner, and its jobs are on shards on which routers
look for them.

Uses the journals of the databases, in the order of their commits (proof/journal.py). The journal records the end of a
shard's ownership before the transaction that ends it commits. The next shard's ownership begins only after that commit.
So, by one clock, an ownership always ends before the next one begins, or at the same time.

A shard whose backup was restored has two histories. The history of the replaced database ends with the replacement. The
history of the backup continues, but the shard owns nothing until an operator accepts the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from proof.checker.evidence import Evidence, Owned, Placed, Restored, State, Violation
from shard.placement.slots import SLOTS, slot_of
from shard.vocabulary import OrgId

_SHOWN_MAX = 5


def check(evidence: Evidence) -> Iterator[Violation]:
    yield from _steps(evidence.placed)
    owned = evidence.owned
    yield from _epochs(owned, evidence.restored)
    if evidence.restored is not None:
        yield from _epochs(evidence.restored.replaced.owned)
        owned = _as_obeyed(owned, evidence.restored)
    yield from _one_owner(owned, slack_s=evidence.history.drift_s)
    yield from _at_rest(evidence)
    yield from _astray(evidence)


# ── The catalog ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(placed: Sequence[Placed]) -> Iterator[Violation]:
    """Yields steps of the catalog that are not allowed. A move has three steps, in this order: it adds the target to
    the shards that are read, makes the target the writer, and removes the source. Only the first step raises the epoch.
    """
    known: dict[int, Placed] = {}
    for now in placed:
        wrong: defaultdict[str, list[int]] = defaultdict(list)
        for slot in now.slots:
            before, known[slot] = known.get(slot), now
            if not _is_a_state(now):
                wrong[f"are written by {_names(now.writes)} and read from {_names(now.reads)}"].append(slot)
            elif before is not None and not _follows(before, now):
                wrong[
                    f"went from {_names(before.writes)} of {_names(before.reads)} at epoch {before.epoch} to "
                    f"{_names(now.writes)} of {_names(now.reads)} at epoch {now.epoch}, which is no step of a move"
                ].append(slot)
        yield from (_violation(f"by the catalog slots {_some(slots)} {what}") for what, slots in wrong.items())


def _is_a_state(now: Placed) -> bool:
    return len(now.writes) == 1 and now.writes[0] in now.reads and len(set(now.reads)) == len(now.reads) <= 2


def _follows(before: Placed, now: Placed) -> bool:
    source, target = before.reads[0], before.reads[-1]
    if len(before.reads) == 1:
        # begin
        return now.epoch > before.epoch and len(now.reads) == 2 and now.writes[0] == now.reads[0] == source
    if now.epoch != before.epoch:
        return False
    if before.writes[0] == source:
        # switch
        return tuple(now.reads) == (source, target) and now.writes[0] == target
    # leave
    return tuple(now.reads) == (target,) and now.writes[0] == target


# ── The shards ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _epochs(owned: Sequence[Owned], restored: Restored | None = None) -> Iterator[Violation]:
    """Yields a violation for each wrong change of what a shard knows about its slots. A shard never goes back to an
    older epoch of a slot, never opens a closed slot again with the same epoch, and takes chunks one after another. But
    a restored shard may skip the chunks that it has lost, when an operator accepts the loss."""
    known: dict[tuple[str, int], Owned] = {}
    for now in owned:
        wrong: defaultdict[str, list[int]] = defaultdict(list)
        for slot in now.slots:
            before, known[now.shard, slot] = known.get((now.shard, slot)), now
            if before is None or now.epoch > before.epoch:
                continue
            if now.epoch < before.epoch:
                wrong[f"fell back from epoch {before.epoch} to {now.epoch}"].append(slot)
            elif now.state != before.state:
                wrong[f"went from {before.state} to {now.state} under epoch {now.epoch}"].append(slot)
            elif now.chunk > before.chunk and restored is not None and _is_accepted(now, restored):
                continue
            elif now.chunk != before.chunk + 1 and not _ends_arrival(before, now):
                wrong[f"went from chunk {before.chunk} to {now.chunk} of epoch {now.epoch}"].append(slot)
        yield from (_violation(f"on {now.shard} slots {_some(slots)} {what}") for what, slots in wrong.items())


def _ends_arrival(before: Owned, now: Owned) -> bool:
    """Returns whether this change only ends the arrival of a slot. The arrival ends when the source has no more jobs of
    the slot; groups then get their group slots on this shard."""
    return before.arriving and not now.arriving and now.chunk == before.chunk


@dataclass(slots=True, kw_only=True)
class _Tenure:
    """The time in which a shard owns a slot."""

    shard: str
    epoch: int
    from_s: float
    until_s: float = float("inf")


def _one_owner(owned: Sequence[Owned], *, slack_s: float) -> Iterator[Violation]:
    tenures: defaultdict[int, list[_Tenure]] = defaultdict(list)
    open_ones: dict[tuple[str, int], _Tenure] = {}
    for now in owned:
        for slot in now.slots:
            tenure = open_ones.get((now.shard, slot))
            if now.state == "owned":
                if tenure is None:
                    tenure = _Tenure(shard=now.shard, epoch=now.epoch, from_s=now.at_s)
                    open_ones[now.shard, slot] = tenure
                    tenures[slot].append(tenure)
                # If the epoch rises and the ownership did not end before, the shard has owned the slot all the time.
                tenure.epoch = now.epoch
            elif tenure is not None:
                del open_ones[now.shard, slot]
                tenure.until_s = now.at_s
    wrong: defaultdict[str, list[int]] = defaultdict(list)
    for slot, of_slot in tenures.items():
        of_slot.sort(key=lambda one: one.from_s)
        for at, earlier in enumerate(of_slot):
            for later in of_slot[at + 1 :]:
                if later.shard != earlier.shard and later.from_s < earlier.until_s - slack_s:
                    both = f"{earlier.shard} (epoch {earlier.epoch}) and {later.shard} (epoch {later.epoch})"
                    wrong[f"were owned by {both} at one time"].append(slot)
    yield from (_violation(f"slots {_some(slots)} {what}") for what, slots in wrong.items())


def _is_accepted(now: Owned, restored: Restored) -> bool:
    return (
        now.shard == restored.shard and now.state == "owned" and restored.accepting_s <= now.at_s <= restored.accepted_s
    )


def _as_obeyed(owned: Sequence[Owned], restored: Restored) -> list[Owned]:
    """Returns, in their order, the changes that decided what each shard was treated as the owner of. Between the
    replacement and the acceptance, the restored shard was treated as the owner of nothing."""
    others = [now for now in owned if now.shard != restored.shard]
    since = [now for now in owned if now.shard == restored.shard and now.at_s >= restored.accepted_s]
    by_then = [now for now in owned if now.shard == restored.shard and now.at_s < restored.accepted_s]
    gone = _owns(restored.replaced.owned, state="draining", at_s=restored.swapped_s)
    come = _owns(by_then, state="owned", at_s=restored.accepted_s)
    return [*others, *restored.replaced.owned, *gone, *come, *since]


def _owns(owned: Sequence[Owned], *, state: str, at_s: float) -> list[Owned]:
    """Returns a change at `at_s` to `state` for each slot that the shard owned at the end of these changes."""
    known = {slot: now for now in owned for slot in now.slots}
    return [replace(now, slots=[slot], state=state, at_s=at_s) for slot, now in known.items() if now.state == "owned"]


# ── In the end ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _at_rest(evidence: Evidence) -> Iterator[Violation]:
    """Yields violations for slots that still move, for slots whose owner does not know that it owns them, and for slots
    that a wrong shard owns."""
    placed = {slot: now for now in evidence.placed for slot in now.slots}
    owned = {(now.shard, slot): now for now in evidence.owned for slot in now.slots}
    # If an org was pinned to the shard on which it lived already, this shard may not know the org's own slot until the
    # org moves.
    moved = {slot for now in evidence.placed if len(now.reads) > 1 for slot in now.slots}
    shards = {now.shard for now in evidence.owned}
    wrong: defaultdict[str, list[int]] = defaultdict(list)
    for slot, now in placed.items():
        if len(now.reads) > 1:
            wrong[f"are still on their way from {now.reads[0]} to {now.reads[-1]}"].append(slot)
            continue
        if not _is_a_state(now):
            # Already reported by `_steps`.
            continue
        (writer,) = now.writes
        for shard in shards:
            known = owned.get((shard, slot))
            owns = known is not None and known.state == "owned"
            if shard != writer:
                if owns:
                    wrong[f"are {writer}'s by the catalog, and {shard} owns them"].append(slot)
            elif known is None and slot >= SLOTS and slot not in moved:
                # The shard accepts the org's jobs because it owns the org's hash slot.
                continue
            elif known is None or not owns or known.epoch != now.epoch:
                what = f"are {writer}'s by the catalog since epoch {now.epoch}, and {writer} does not know"
                wrong[what].append(slot)
    yield from (_violation(f"in the end slots {_some(slots)} {what}") for what, slots in wrong.items())


def _astray(evidence: Evidence) -> Iterator[Violation]:
    """Yields violations for jobs on a shard where no router looks for them."""
    placed = {slot: now for now in evidence.placed for slot in now.slots}
    if not placed:
        return
    writers: defaultdict[int, set[str]] = defaultdict(set)
    for now in evidence.placed:
        for slot in now.slots:
            writers[slot].update(now.writes)
    for row in evidence.rows:
        by_hash = slot_of(OrgId(row.org))
        slot = evidence.pins.get(row.org, by_hash)
        now = placed[slot]
        if row.departing:
            if len(now.reads) == 1:
                yield _violation(f"job {row.job} of {row.org} departs from {row.shard}, and its slot {slot} is at rest")
        elif row.state in {State.LIVE, State.DEAD}:
            if row.shard not in now.reads:
                yield _violation(
                    f"job {row.job} of {row.org} is {row.state} on {row.shard}, and its slot {slot} is read from "
                    f"{_names(now.reads)}"
                )
        elif row.shard not in writers[slot] | writers[by_hash]:
            yield _violation(f"job {row.job} of {row.org} has finished on {row.shard}, which never had its slot {slot}")


def _names(shards: Sequence[str]) -> str:
    return " and ".join(shards) or "nobody"


def _some(slots: Sequence[int]) -> str:
    shown = ", ".join(map(str, slots[:_SHOWN_MAX]))
    return f"{shown} and {len(slots) - _SHOWN_MAX} more" if len(slots) > _SHOWN_MAX else shown


def _violation(what: str) -> Violation:
    return Violation(invariant="I6", what=what)
