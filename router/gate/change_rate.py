"""Limits how many audited changes the callers of an org may make: each change is a row of the audit log, in the
catalog's database. Pure."""

from __future__ import annotations

from collections import OrderedDict

# The limit for one org in one router process. The calls and commands of operators have no limit.
CHANGES_PER_S = 5.0
# How many changes an org may make without a pause after it has made none for a minute.
CHANGES_AT_ONCE = 300


class ChangeRate:
    """Counts the changes of orgs. All times are in seconds of the same clock, which must not go backwards."""

    def __init__(self, per_s: float = CHANGES_PER_S, at_once: int = CHANGES_AT_ONCE) -> None:
        self._each_s = 1 / per_s
        self._debt_s_max = at_once / per_s
        # A change costs an org 1 / `per_s` seconds. This is the time at which each org has paid for all its changes;
        # the org with the latest change comes last. An org that has no time in this table may make `at_once` changes.
        self._paid_at_s: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, org: str, now_s: float) -> float:
        """Counts a change and returns 0. If no change is allowed now, counts nothing and returns after how many seconds
        one is allowed."""
        paid_at_s = max(self._paid_at_s.get(org, now_s), now_s) + self._each_s
        wait_s = paid_at_s - now_s - self._debt_s_max
        if wait_s > 0:
            return wait_s
        self._paid_at_s[org] = paid_at_s
        self._paid_at_s.move_to_end(org)
        self._forget(now_s)
        return 0.0

    def _forget(self, now_s: float) -> None:
        """Forgets orgs that owe nothing. Begins with the org whose latest change is the oldest, and ends at the first
        org that owes something."""
        while self._paid_at_s:
            oldest = next(iter(self._paid_at_s))
            if self._paid_at_s[oldest] > now_s:
                break
            del self._paid_at_s[oldest]
