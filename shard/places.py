"""Places that orgs share, and none of them can take. Pure."""

from __future__ import annotations

from collections.abc import Hashable


class Places:
    """So many places, of which nobody may hold more than are left free: one who is alone has half of them, n who want
    all they can get have 1/(n + 1) each, and as much is free for another. (Dynamic thresholds: Choudhury, Hahne,
    "Dynamic queue length thresholds for shared-memory packet switches", 1998.)"""

    def __init__(self, places_max: int) -> None:
        self.places_max = places_max
        self.taken = 0
        self._held: dict[Hashable, int] = {}

    def take(self, whose: Hashable, count: int = 1) -> bool:
        """Whether there was room. While all are free there is, for however many."""
        held = self._held.get(whose, 0) + count
        if held > self.places_max - self.taken and self.taken:
            return False
        self._held[whose] = held
        self.taken += count
        return True

    def has_room(self, whose: Hashable) -> bool:
        """Whether one more could be taken."""
        return self._held.get(whose, 0) < self.places_max - self.taken

    def hold(self, whose: Hashable, count: int = 1) -> None:
        """So many more, whether or not there is room."""
        self._held[whose] = self._held.get(whose, 0) + count
        self.taken += count

    def give_back(self, whose: Hashable, count: int = 1) -> None:
        self.taken -= count
        held = self._held.pop(whose, 0) - count
        if held:
            self._held[whose] = held
