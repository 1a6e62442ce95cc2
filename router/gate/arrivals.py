"""Counts the bytes that each connection has sent and that this process does not hold in incomplete messages. All
further bytes that the connection's socket has received (router/gate/connections.py) may be held by the process in
messages that are not complete. Pure.

For each message, this module counts only the bytes that the message must have had on the wire. If it counted more, such
as a call's metadata, a client could hide bytes that are held for this client, because HPACK sends repeated metadata in
a few bytes. So the count falls behind the true number by about 100 bytes for each call, and `catch_up` corrects the
count. `catch_up` notes how many bytes a connection has received, and which calls the connection has. When all these
calls have ended, none of these bytes are held any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

# The smallest overhead of a call, in bytes: the headers of two frames, HEADERS and DATA.
CALL_BYTES = 18
# The smallest overhead of a message, in bytes: gRPC's prefix. A client may put many messages into one frame.
MESSAGE_BYTES = 5


class Arrivals:
    """Counts for each connection separately. Each call has a round: how often `catch_up` was called before the call
    began."""

    def __init__(self) -> None:
        # The calls and streams that have not ended, by connection.
        self.inside = Counter[str]()
        # For each connection, how many of its bytes this process does not hold in incomplete messages. The number may
        # be too small, but never too large.
        self.done = Counter[str]()
        # How many requests of unary calls, and messages of streams, were received.
        self.count = 0
        self.round = 0
        self._goals: dict[str, _Goal] = {}

    def begin(self, peer: str) -> int:
        """Counts a call. Returns its round, which the caller passes to the other methods."""
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
        """Begins a round. `received` is how many bytes each connection had received at an earlier moment. Call this
        only when each call that had sent something by that moment has begun here."""
        self.round += 1
        for peer, count in received.items():
            if peer not in self._goals:
                self._goals[peer] = goal = _Goal(self.round, self.inside[peer], count)
                self._reach(peer, goal)

    def forget(self, connected: Container[str]) -> None:
        """Forgets connections that are not in `connected`, except connections with calls: these may have connected
        since `connected` was read."""
        for peer in [peer for peer in self.done if peer not in connected and peer not in self.inside]:
            del self.done[peer]
            self._goals.pop(peer, None)

    def _reach(self, peer: str, goal: _Goal) -> None:
        if not goal.older:
            self.done[peer] = max(self.done[peer], goal.done)
            del self._goals[peer]


class _Goal:
    """A correction that waits. When the connection's calls of rounds before `round` have ended, the connection's count
    rises to `done`, unless the count is higher already."""

    __slots__ = ("done", "older", "round")

    def __init__(self, number: int, older: int, done: int) -> None:
        self.round = number
        self.older = older
        self.done = done
