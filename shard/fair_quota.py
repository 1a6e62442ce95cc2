"""A quota that orgs share fairly: no org can take all of it. Pure."""

from __future__ import annotations

from collections.abc import Hashable


class FairQuota:
    """A number of places that several keys (orgs) share. A key may not hold more places than are still free. So a key
    that is alone can hold half of the places. If n keys take as many places as they may, each of them holds 1/(n + 1)
    of the places, and as many remain free for another key. (Dynamic thresholds: Choudhury, Hahne, "Dynamic queue length
    thresholds for shared-memory packet switches", 1998.)"""

    def __init__(self, places_max: int) -> None:
        self.places_max = places_max
        self.taken = 0
        self._held: dict[Hashable, int] = {}

    def take(self, key: Hashable, count: int = 1) -> bool:
        """Takes `count` places if there is room. Returns whether they were taken. If all places are free, any count
        fits."""
        if not self.fits(key, count):
            return False
        held = self._held.get(key, 0) + count
        if held:
            self._held[key] = held
        self.taken += count
        return True

    def fits(self, key: Hashable, count: int) -> bool:
        """Returns whether `take` would succeed."""
        return self._held.get(key, 0) + count <= self.places_max - self.taken or not self.taken

    def held(self, key: Hashable) -> int:
        """Returns how many places the key holds."""
        return self._held.get(key, 0)

    def hold(self, key: Hashable, count: int = 1) -> None:
        """Takes `count` places, even if there is no room."""
        if count:
            self._held[key] = self._held.get(key, 0) + count
            self.taken += count

    def give_back(self, key: Hashable, count: int = 1) -> None:
        self.taken -= count
        held = self._held.pop(key, 0) - count
        if held:
            self._held[key] = held
