"""Decides which org's job runs next when one pool of workers serves many orgs. This module does no I/O and reads no
clock: callers pass the time, in seconds of any monotonic clock.

The method is start-time fair queueing (Goyal, Vin, Cheng: "Start-time fair queueing", 1996). Each org has a tag, a
point in virtual time. The ready org with the smallest tag is served next. Then the tag of this org grows by the time
that the org is charged, divided by the org's weight. So orgs that always have ready jobs get worker-seconds in
proportion to their weights. If only one org has ready jobs, it gets all worker-seconds.

An org is charged for each lease: for the time from the hand-out of the job to the end of the lease. When a job is
handed out, this time is not known yet, so the org is charged an estimate, which is corrected later. The floor of
virtual time is the tag of the org served last. The tag of an org that becomes ready is raised to the floor if it is
lower: an org cannot save up time while it has no jobs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shard.bounded import make_room
from shard.vocabulary import OrgId, ShardName

# The weight of an org whose weight was not set.
WEIGHT_DEFAULT = 1.0
# The fraction of an estimate that comes from the newest measurement.
_NEW_PART = 0.2
# The estimate before anything was measured.
_FIRST_ESTIMATE_S = 0.05
# Charges are brought up to date at an interval. The interval is _ACCRUE_S or the number of leases times
# _ACCRUE_LEASE_S, whichever is longer.
_ACCRUE_S = 0.05
_ACCRUE_LEASE_S = 0.000_05
# If more orgs than this are remembered, the schedule looks for orgs that it can forget.
_IDLE_KEPT = 1_000
# At most this many idle orgs, estimates and leases are remembered.
_ORGS_MAX = 100_000
_ESTIMATES_MAX = 10_000
_LEASES_MAX = 200_000


@dataclass(slots=True)
class _Org:
    tag: float
    weight: float
    # The shards on which the org has ready jobs.
    shards: set[ShardName] = field(default_factory=set[ShardName])
    # How many of the org's jobs are leased.
    running: int = 0
    # The shards on which `pick` does not pick the org, although the org has ready jobs there.
    passed: set[ShardName] = field(default_factory=set[ShardName])


@dataclass(slots=True)
class _Lease:
    org: OrgId
    since_s: float
    # When the lease ends if nobody extends it.
    until_s: float
    # The time that the org was charged for this lease so far.
    charged_s: float


class Pick(NamedTuple):
    """The org whose job is handed out next, and the shard. `charged_s`: the estimate that the org was charged. `start`:
    the tag that the org had before this charge."""

    org: OrgId
    shard: ShardName
    charged_s: float
    start: float


class Schedule:
    """The orgs of one pool. An org may have ready jobs on several shards; `pick` looks only at the shards that it is
    given. `weight_of` returns the weight of an org, more than 0."""

    def __init__(self, weight_of: Callable[[OrgId], float] = lambda _: WEIGHT_DEFAULT) -> None:
        self._weight_of = weight_of
        self._orgs: dict[OrgId, _Org] = {}
        self._ready = 0
        # The ready orgs of each shard, ordered by tag. An entry is stale if the org's tag has changed since the entry
        # was added, or if the org is not ready on this shard any more.
        self._heaps: dict[ShardName, list[tuple[float, int, OrgId]]] = {}
        self._turns = itertools.count()
        self._leases: dict[Hashable, _Lease] = {}
        self._estimates: dict[OrgId, float] = {}
        self._mean_s = _FIRST_ESTIMATE_S
        self._accrue_from_s = -math.inf
        # The highest tag that any org has had.
        self._top = 0.0
        # If the schedule remembers more orgs than this, it forgets idle orgs whose tags are not above the floor.
        self._forget_above = _IDLE_KEPT
        self.floor = 0.0

    @property
    def ready_count(self) -> int:
        """How many orgs have ready jobs."""
        return self._ready

    @property
    def size(self) -> int:
        """How many orgs the schedule remembers."""
        return len(self._orgs)

    def is_ready(self, org: OrgId) -> bool:
        known = self._orgs.get(org)
        return known is not None and bool(known.shards)

    def lead(self, org: OrgId) -> float:
        """Returns how far the org's tag is above the floor, in seconds of virtual time, or 0 if the tag is not above
        the floor."""
        known = self._orgs.get(org)
        return 0.0 if known is None else max(0.0, known.tag - self.floor)

    def weight(self, org: OrgId) -> float:
        return self._weight_of(org)

    # ── Ready jobs ───────────────────────────────────────────────────────────────────────────────────────────────────

    def ready(self, org: OrgId, shard: ShardName) -> None:
        """Records that the org has ready jobs on this shard."""
        known = self._orgs.get(org)
        if known is None:
            known = self._orgs[org] = _Org(self.floor, self._weight_of(org))
        if shard in known.shards:
            return
        if not known.shards:
            known.tag = max(known.tag, self.floor)
            self._ready += 1
        known.shards.add(shard)
        self._push(org, known, (shard,))

    def idle(self, org: OrgId, shard: ShardName) -> None:
        """Records that the org has no more ready jobs on this shard."""
        known = self._orgs.get(org)
        if known is None or shard not in known.shards:
            return
        known.shards.discard(shard)
        if not known.shards:
            self._ready -= 1
            if not self._ready:
                # No org has ready jobs. So raise the floor to the highest tag: then all orgs that become ready start
                # with the same tag.
                self.floor = self._top = max(self._top, self.floor)
                self._heaps.clear()
            self._forget()

    def drop_shard(self, shard: ShardName) -> None:
        """Records that no org has ready jobs on this shard, as far as this process knows."""
        for org in [org for org, known in self._orgs.items() if shard in known.shards]:
            self.idle(org, shard)
        self._heaps.pop(shard, None)

    def pick(self, shards: Iterable[ShardName]) -> Pick | None:
        """Returns the org whose job is handed out next, and a shard on which this org has ready jobs. Returns None if
        no org has ready jobs on these shards. The org is charged its estimate. If the job is then handed out, call
        `served` and `began`. If not, call `unused`."""
        best: tuple[float, int, OrgId] | None = None
        at: ShardName | None = None
        for shard in shards:
            first = self._first(shard)
            if first is not None and (best is None or first < best):
                best, at = first, shard
        if best is None or at is None:
            return None
        start, _, org = best
        charged_s = self.estimate_s(org)
        self._charge(org, charged_s)
        return Pick(org, at, charged_s, start)

    def served(self, start: float) -> None:
        """Raises the floor to the start of a pick whose job was found. A pick that finds no job must not raise the
        floor: the org of such a pick gets the charge back, and its tag could then be below the floor. The org would be
        served before the orgs that become ready at the floor."""
        self.floor = max(self.floor, start)

    def pass_over(self, org: OrgId, shard: ShardName) -> None:
        """Leaves the org out of the picks on this shard until `end_pass` is called."""
        known = self._orgs.get(org)
        if known is not None:
            known.passed.add(shard)

    def end_pass(self, org: OrgId, shard: ShardName) -> None:
        known = self._orgs.get(org)
        if known is not None and shard in known.passed:
            known.passed.discard(shard)
            if shard in known.shards:
                self._push(org, known, (shard,))

    def turns(self, org: OrgId, *, at_most: int) -> int:
        """Call this for an org that has no ready jobs. Returns how many jobs of this org would be handed out before the
        first job of a ready org, if this org got ready jobs now. Stops counting at `at_most`."""
        others = [first[0] for shard in self._heaps if (first := self._first(shard)) is not None]
        if not others:
            return at_most
        known = self._orgs.get(org)
        tag = self.floor if known is None else max(known.tag, self.floor)
        cost = self.estimate_s(org) / (self._weight_of(org) if known is None else known.weight)
        ahead = min(others) - tag
        if ahead < 0:
            return 0
        return at_most if ahead >= cost * at_most else min(at_most, 1 + int(ahead / cost))

    def unused(self, org: OrgId, charged_s: float) -> None:
        """Reduces the charge of the org by `charged_s`, because picks of this org have found no job."""
        self._charge(org, -charged_s)

    # ── Leases ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def estimate_s(self, org: OrgId) -> float:
        """Returns how long a lease of this org probably lasts."""
        return self._estimates.get(org, self._mean_s)

    def began(
        self, org: OrgId, lease: Hashable, *, now_s: float, until_s: float, charged_s: float | None = None
    ) -> None:
        """Records that a job of the org was handed out. Its lease ends at `until_s` if nobody extends it. `charged_s`
        is what the org was charged when this job was picked. None: the job was not picked, and the org is charged
        now."""
        if charged_s is None:
            handed = self._orgs.setdefault(org, _Org(self.floor, self._weight_of(org)))
            charged_s = self.estimate_s(org)
            # If the leases of an org were shorter than estimated, its tag may be below the floor. Here the tag is
            # raised until it is below the floor only by as much as the running leases may still give back. So the org
            # gains nothing from the time in which it had no jobs.
            unused = self.floor - handed.tag - (handed.running + 1) * charged_s / handed.weight
            self._charge(org, charged_s + max(0.0, unused) * handed.weight)
        known = self._orgs.get(org)
        if known is not None and len(self._leases) < _LEASES_MAX:
            known.running += 1
            self._leases[lease] = _Lease(org, now_s, until_s, charged_s)

    def extended(self, lease: Hashable, *, until_s: float) -> None:
        """Records that a lease now ends at `until_s`. Ignores a time that is earlier than the recorded one."""
        known = self._leases.get(lease)
        if known is not None:
            known.until_s = max(known.until_s, until_s)

    def ended(self, lease: Hashable, *, now_s: float) -> None:
        """Ends a lease, and charges its org for as long as the lease lasted. Does nothing for a lease that is not
        known, or has ended before."""
        known = self._leases.pop(lease, None)
        if known is None:
            return
        lasted_s = max(0.0, min(now_s, known.until_s) - known.since_s)
        org = self._orgs.get(known.org)
        if org is not None:
            org.running -= 1
        self._charge(known.org, lasted_s - known.charged_s)
        self._measured(known.org, lasted_s)

    def returned(self, lease: Hashable) -> None:
        """Ends a lease whose job did not reach a worker, and charges its org nothing for it."""
        known = self._leases.pop(lease, None)
        if known is not None:
            org = self._orgs.get(known.org)
            if org is not None:
                org.running -= 1
            self._charge(known.org, -known.charged_s)

    def accrue(self, *, now_s: float) -> None:
        """Ends leases that have expired, and charges orgs for the time that their other leases have lasted beyond the
        estimates. Call this before jobs are handed out: otherwise an org whose jobs suddenly take hours would be
        charged for these hours only when its leases end. Looks at the leases at most 20 times a second, and less often
        if there are thousands of leases."""
        if now_s < self._accrue_from_s:
            return
        self._accrue_from_s = now_s + max(_ACCRUE_S, len(self._leases) * _ACCRUE_LEASE_S)
        for lease, known in list(self._leases.items()):
            if known.until_s <= now_s:
                self.ended(lease, now_s=now_s)
            elif (beyond_s := now_s - known.since_s - known.charged_s) > 0:
                known.charged_s += beyond_s
                self._charge(known.org, beyond_s)

    def reweigh(self) -> None:
        """Applies changed weights, also to the orgs that are remembered already. The distance of such an org's tag
        above the floor is converted to the new weight."""
        for org, known in self._orgs.items():
            self._take_weight(org, known)

    # ── The parts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _charge(self, org: OrgId, seconds: float) -> None:
        known = self._orgs.get(org)
        if known is None or not seconds:
            return
        known.tag += seconds / known.weight
        self._top = max(self._top, known.tag)
        self._push(org, known, known.shards)

    def _take_weight(self, org: OrgId, known: _Org) -> None:
        weight = self._weight_of(org)
        if weight != known.weight:
            ahead = max(0.0, known.tag - self.floor)
            known.tag += ahead * known.weight / weight - ahead
            known.weight = weight
            self._top = max(self._top, known.tag)
            self._push(org, known, known.shards)

    def _push(self, org: OrgId, known: _Org, shards: Collection[ShardName]) -> None:
        for shard in shards:
            heap = self._heaps.setdefault(shard, [])
            heapq.heappush(heap, (known.tag, next(self._turns), org))
            if len(heap) > 4 * self._ready + _IDLE_KEPT:
                fresh = {entry[2]: entry for entry in heap if self._is_fresh(entry, shard)}
                self._heaps[shard] = list(fresh.values())
                heapq.heapify(self._heaps[shard])

    def _first(self, shard: ShardName) -> tuple[float, int, OrgId] | None:
        heap = self._heaps.get(shard)
        while heap:
            if self._is_fresh(heap[0], shard):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _is_fresh(self, entry: tuple[float, int, OrgId], shard: ShardName) -> bool:
        known = self._orgs.get(entry[2])
        return known is not None and known.tag == entry[0] and shard in known.shards and shard not in known.passed

    def _measured(self, org: OrgId, lasted_s: float) -> None:
        before_s = self._estimates.pop(org, None)
        estimate_s = lasted_s if before_s is None else (1 - _NEW_PART) * before_s + _NEW_PART * lasted_s
        make_room(self._estimates, _ESTIMATES_MAX)
        # The org that was measured most recently comes last.
        self._estimates[org] = estimate_s
        self._mean_s = (1 - _NEW_PART) * self._mean_s + _NEW_PART * lasted_s

    def _forget(self) -> None:
        """Forgets idle orgs whose tags are not above the floor. Nothing is lost, because such an org would start again
        at the floor in any case."""
        if len(self._orgs) <= self._forget_above:
            return
        kept = {o: known for o, known in self._orgs.items() if known.shards or known.running or known.tag > self.floor}
        idle = [org for org, known in kept.items() if not known.shards and not known.running]
        if len(idle) > _ORGS_MAX:
            # A forgotten org starts again at the floor, so forget the orgs whose tags are the least above the floor.
            idle.sort(key=lambda org: kept[org].tag)
            for org in idle[: len(idle) // 2]:
                del kept[org]
        self._orgs = kept
        self._forget_above = 2 * len(kept) + _IDLE_KEPT
