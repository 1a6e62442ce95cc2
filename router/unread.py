"""Room for what the consumers of one router process have not read yet."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from shard.places import Places
from shard.vocabulary import OrgId

# Of jobs that are leased, and wait in this process to be written.
UNREAD_BYTES_MAX = 256 * 1024 * 1024
# Who waits for room looks again after so long, whatever was or was not given back.
_AGAIN_S = 5.0


class Unread:
    """So many bytes for all streams together, shared by orgs as places are: a consumer that does not read is of little
    harm, and thousands of one org's cannot take the process's memory."""

    def __init__(self, bytes_max: int = UNREAD_BYTES_MAX) -> None:
        self._places = Places(bytes_max)
        # Of each org, who waits; the first one first.
        self._lines: dict[OrgId, OrderedDict[asyncio.Future[None], None]] = {}

    def take(self, org: OrgId, size: int) -> bool:
        """Whether there was room."""
        return self._places.take(org, size)

    def give_back(self, org: OrgId, size: int) -> None:
        self._places.give_back(org, size)
        self._wake_one(org)

    async def given_back(self, org: OrgId) -> None:
        """Returns when some of the org's has been given back, to one who waits at a time; or after a while."""
        line = self._lines.setdefault(org, OrderedDict())
        turn = asyncio.get_running_loop().create_future()
        line[turn] = None
        try:
            async with asyncio.timeout(_AGAIN_S):
                await turn
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake_one(org)
            raise
        finally:
            line.pop(turn, None)
            if not line and self._lines.get(org) is line:
                del self._lines[org]

    def _wake_one(self, org: OrgId) -> None:
        line = self._lines.get(org)
        while line:
            turn, _ = line.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
