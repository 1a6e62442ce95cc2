"""Counts the bytes that each connection has sent and this process is done with. What a connection's socket has received
beyond them (router/gate/connections.py) is what the connection may hold in messages that are not complete. Pure.

For each message, this module counts only the bytes that the message must have had on the wire. Counting more, such as a
call's metadata, would let a client hide what it holds: HPACK sends metadata that it repeats in a few bytes. So the
count falls behind, by about 100 bytes a call, and `catch_up` corrects it: once all calls have ended that were there
when a connection had received a certain number of bytes, none of these bytes are held any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

# The least bytes of a call beside its message: the headers of two frames, HEADERS and DATA.
CALL_BYTES = 18
# The least bytes of a message beside its content: gRPC's prefix. A client may put many messages into one frame.
MESSAGE_BYTES = 5


class Arrivals:
    """Counts by connection. Calls are told apart by their round: how often `catch_up` was called before they began."""

    def __init__(self) -> None:
        # The calls and streams that have not ended, by connection.
        self.inside = Counter[str]()
        # How many of its bytes this process is done with, by connection: never too many.
        self.done = Counter[str]()
        # How many calls and messages were counted.
        self.count = 0
        self.round = 0
        self._goals: dict[str, _Goal] = {}

    def begin(self, peer: str) -> int:
        """Counts a call. Returns its round, which the caller passes on."""
        self.inside[peer] += 1
        return self.round

    def received(self, peer: str, began: int, count: int) -> None:
        """Counts `count` bytes of a call that began in the round `began`."""
        self.count += 1
        self.done[peer] += count
        goal = self._goals.get(peer)
        if goal is not None and began >= goal.round:
            goal.done += count

    def end(self, peer: str, began: int) -> None:
        """Ends a call that began in the round `began`."""
        self.inside[peer] -= 1
        if not self.inside[peer]:
            del self.inside[peer]
        goal = self._goals.get(peer)
        if goal is not None and began < goal.round:
            goal.older -= 1
            self._reach(peer, goal)

    def catch_up(self, received: Mapping[str, int]) -> None:
        """Begins a round. `received` is what each connection had received at a time before which every call that has
        not begun yet had sent nothing."""
        self.round += 1
        for peer, count in received.items():
            if peer not in self._goals:
                self._goals[peer] = goal = _Goal(self.round, self.inside[peer], count)
                self._reach(peer, goal)

    def forget(self, connected: Container[str]) -> None:
        """Forgets connections that are not in `connected`, except those with calls: they may have connected since."""
        for peer in [peer for peer in self.done if peer not in connected and peer not in self.inside]:
            del self.done[peer]
            self._goals.pop(peer, None)

    def _reach(self, peer: str, goal: _Goal) -> None:
        if not goal.older:
            self.done[peer] = max(self.done[peer], goal.done)
            del self._goals[peer]


class _Goal:
    """The value to which the count rises when the calls of earlier rounds have ended."""

    __slots__ = ("done", "older", "round")

    def __init__(self, number: int, older: int, done: int) -> None:
        self.round = number
        self.older = older
        self.done = done
