"""Where pinned orgs are to live: what operators wish for, as far as the cluster file's shards allow. Pure.

Least movement: an org on a shard that will do stays there. Where nothing will do it stays too, and the reason is told:
an org is never sent to a shard that it was not wished to be on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shard.catalog import Catalog
from shard.cluster import ShardEntry, ShardState
from shard.pinning import OnShard, Pin, Wish
from shard.placement import slot_of
from shard.vocabulary import OrgId, ShardName, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPins:
    """`owners`: of every slot that is an org's own, where it is to be. A slot that moves is where it goes to."""

    owners: Mapping[Slot, ShardName]
    # Why an org is not where it was wished to be, and cannot be brought there.
    complaints: Mapping[OrgId, str]


def plan(catalog: Catalog, pins: Sequence[Pin], entries: Sequence[ShardEntry]) -> PlannedPins:
    """For a copy of the catalog, and the pins read before it or after. Those that the copy does not know yet are left
    for the next time."""
    owners: dict[Slot, ShardName] = {}
    complaints: dict[OrgId, str] = {}
    homeless: list[tuple[Pin, list[ShardEntry]]] = []
    by_name = {entry.name: entry for entry in entries}
    for pin in pins:
        if pin.slot >= len(catalog.slots):
            continue
        here = catalog.slots[pin.slot].reads[-1]
        home = catalog.slots[slot_of(pin.org)].reads[-1]
        if home == here if pin.wish is None else here in by_name and _stays(by_name[here], pin.wish):
            owners[pin.slot] = here
        elif why := _why_rests(pin.wish, entries, here=here, home=home):
            owners[pin.slot] = here
            complaints[pin.org] = f"org {pin.org!r} stays on shard {here!r}: {why}"
        elif pin.wish is None:
            owners[pin.slot] = home
        else:
            homeless.append((pin, [entry for entry in entries if fits(entry, pin.wish) and takes_pins(entry)]))
    orgs = Counter(owners.values())
    for pin, there in homeless:
        best = min(there, key=lambda entry: (_load(orgs[entry.name], entry.weight), orgs[entry.name], entry.name))
        owners[pin.slot] = best.name
        orgs[best.name] += 1
    return PlannedPins(owners=owners, complaints=complaints)


def why_not(wish: Wish, entries: Sequence[ShardEntry]) -> str | None:
    """Why no shard can be given an org with this wish, for an operator; None: one can."""
    fitting = [entry for entry in entries if fits(entry, wish)]
    if any(map(takes_pins, fitting)):
        return None
    if fitting:
        states = ", ".join(f"shard {entry.name!r} is {entry.state.word}" for entry in fitting)
        return f"{states}, and so takes no orgs; change that in the cluster file, or wish for another"
    if isinstance(wish, OnShard):
        return f"the cluster file names no shard {wish.shard!r}; it has {', '.join(entry.name for entry in entries)}"
    values = sorted({value for entry in entries if (value := entry.labels.get(wish.label)) is not None})
    known = f"there is {wish.label}={f', {wish.label}='.join(values)}" if values else f"none has a label {wish.label!r}"
    return f"the cluster file has no shard with the label {wish}; {known}"


def _why_rests(wish: Wish | None, entries: Sequence[ShardEntry], *, here: ShardName, home: ShardName) -> str | None:
    """Why an org cannot leave the shard where it is, for one that is wished for, or the home of its hash."""
    if wish is not None and (why := why_not(wish, entries)):
        return why
    by_name = {entry.name: entry for entry in entries}
    for name in (here,) if wish is not None else (here, home):
        entry = by_name.get(name)
        if entry is None:
            return f"the cluster file does not name shard {name!r}"
        if not entry.state.takes_changes or (name != here and not entry.state.takes_enqueues):
            return f"the state of shard {name!r} is {entry.state.word}"
    return None


def fits(entry: ShardEntry, wish: Wish) -> bool:
    if isinstance(wish, OnShard):
        return entry.name == wish.shard
    return entry.labels.get(wish.label) == wish.value


def takes_pins(entry: ShardEntry) -> bool:
    """Also one of weight 0: it is kept for pinned orgs."""
    return entry.state.takes_enqueues and entry.state is not ShardState.DRAINING


def _stays(entry: ShardEntry, wish: Wish) -> bool:
    """Also where the shard takes no jobs for a while, as its operator wants it."""
    return fits(entry, wish) and entry.state is not ShardState.DRAINING


def _load(orgs: int, weight: float) -> float:
    """Of a shard that gets one more."""
    return (orgs + 1) / weight if weight else math.inf
