"""Plans on which shards pinned orgs should live. Follows the operators' pins, as far as the shards of the cluster file
allow. Pure.

Orgs move as little as possible: an org on a suitable shard stays there. If no shard is suitable, the org stays too, and
the plan says why. An org is never sent to a shard that its pin does not allow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shard.placement.catalog import Catalog
from shard.placement.cluster_file import ShardEntry, ShardState
from shard.placement.pins import OnShard, Pin, PinTarget
from shard.placement.slots import slot_of
from shard.vocabulary import OrgId, ShardName, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPins:
    """`owners`: for the own slot of each pinned org, the shard where this slot should be. A slot that moves now counts
    as being on the move's target."""

    owners: Mapping[Slot, ShardName]
    # Why an org is not where its pin wants it and cannot be moved there.
    complaints: Mapping[OrgId, str]


def plan(catalog: Catalog, pins: Sequence[Pin], entries: Sequence[ShardEntry]) -> PlannedPins:
    """Plans from a copy of the catalog and the pins. The catalog and the pins may be read in either order: if the copy
    does not have the slot of a pin yet, the next plan handles this pin."""
    owners: dict[Slot, ShardName] = {}
    complaints: dict[OrgId, str] = {}
    to_place: list[tuple[Pin, list[ShardEntry]]] = []
    by_name = {entry.name: entry for entry in entries}
    for pin in pins:
        if pin.slot >= len(catalog.slots):
            continue
        here = catalog.slots[pin.slot].reads[-1]
        home = catalog.slots[slot_of(pin.org)].reads[-1]
        if home == here if pin.target is None else here in by_name and _may_stay(by_name[here], pin.target):
            owners[pin.slot] = here
        elif why := _why_stays(pin.target, entries, here=here, home=home):
            owners[pin.slot] = here
            complaints[pin.org] = f"org {pin.org!r} stays on shard {here!r}: {why}"
        elif pin.target is None:
            owners[pin.slot] = home
        else:
            to_place.append((pin, [entry for entry in entries if fits(entry, pin.target) and takes_pins(entry)]))
    orgs = Counter(owners.values())
    for pin, candidates in to_place:
        best = min(candidates, key=lambda entry: (_load(orgs[entry.name], entry.weight), orgs[entry.name], entry.name))
        owners[pin.slot] = best.name
        orgs[best.name] += 1
    return PlannedPins(owners=owners, complaints=complaints)


def why_not(target: PinTarget, entries: Sequence[ShardEntry]) -> str | None:
    """Returns why no shard can take an org with this pin target, as a text for operators. Returns None if a shard can
    take it."""
    fitting = [entry for entry in entries if fits(entry, target)]
    if any(map(takes_pins, fitting)):
        return None
    if fitting:
        states = ", ".join(f"shard {entry.name!r} is {entry.state.word}" for entry in fitting)
        return f"{states}, and so takes no orgs; change that in the cluster file, or pin the org elsewhere"
    if isinstance(target, OnShard):
        return f"the cluster file names no shard {target.shard!r}; it has {', '.join(entry.name for entry in entries)}"
    values = sorted({value for entry in entries if (value := entry.labels.get(target.label)) is not None})
    known = (
        f"there is {target.label}={f', {target.label}='.join(values)}"
        if values
        else f"none has a label {target.label!r}"
    )
    return f"the cluster file has no shard with the label {target}; {known}"


def _why_stays(
    target: PinTarget | None, entries: Sequence[ShardEntry], *, here: ShardName, home: ShardName
) -> str | None:
    """Returns why an org cannot leave its shard (`here`) for its pin's target, or for the shard of its hash slot
    (`home`). Returns None if the org can leave."""
    if target is not None and (why := why_not(target, entries)):
        return why
    by_name = {entry.name: entry for entry in entries}
    for name in (here,) if target is not None else (here, home):
        entry = by_name.get(name)
        if entry is None:
            return f"the cluster file does not name shard {name!r}"
        if not entry.state.takes_changes or (name != here and not entry.state.takes_enqueues):
            return f"the state of shard {name!r} is {entry.state.word}"
    return None


def fits(entry: ShardEntry, target: PinTarget) -> bool:
    if isinstance(target, OnShard):
        return entry.name == target.shard
    return entry.labels.get(target.label) == target.value


def takes_pins(entry: ShardEntry) -> bool:
    """Returns whether orgs may be pinned to a shard. A shard of weight 0 takes pinned orgs too: it may be reserved for
    them."""
    return entry.state.takes_enqueues and entry.state is not ShardState.DRAINING


def _may_stay(entry: ShardEntry, target: PinTarget) -> bool:
    """Returns whether a pinned org may stay on its shard. The org may stay even if the state of the shard says that the
    shard takes no jobs for now."""
    return fits(entry, target) and entry.state is not ShardState.DRAINING


def _load(orgs: int, weight: float) -> float:
    """Returns how many pinned orgs per unit of weight a shard will have after it gets one more org."""
    return (orgs + 1) / weight if weight else math.inf
