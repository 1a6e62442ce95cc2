"""Records on one shard in which queues consumers look for jobs, and which kinds they take, so that ExplainJob can say
that nobody takes a job. These records are a hint (invariant I7): nothing else reads them, and they may be wrong.

A consumer is noted when it looks for jobs for the first time, and then each minute while it stays. The notes are
written at most once a second, and the row of each queue and kind about once a minute. For a consumer that was noted a
short time ago, the hot path only looks up one number in memory. Without consumers, nothing is noted and nothing is
written.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from shard.fair_quota import FairQuota
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.queue_ids import QueueIds
from shard.vocabulary import OrgId, QueueName

# The interval at which consumers that stay connected are noted again.
NOTE_S = 60.0
# The pause after each write.
PAUSE_S = 1.0
# A consumer is noted again if its last note is older than this. This time is shorter than NOTE_S, the interval at which
# consumers that stay connected are noted. It is longer than the age at which record_consumers.sql updates a row.
_AGAIN_S = 50.0
# For how long a consumer counts as present after it was seen. This time is long enough even if a few notes are late or
# get lost.
SEEN_US = 180_000_000
_FORGET_EVERY_S = 3600.0
# Upper bound for the rows of one statement.
_ROWS_MAX = 1_000
# Upper bound for the pairs of a queue and a kind that wait to be written. Orgs share these places fairly (invariant
# I4). When the places are taken, no other pairs are noted until these pairs have been written.
_NOTED_MAX = 10_000
# If there are more consumers than this, all are forgotten, and each is noted again when it looks for jobs the next
# time.
_CONSUMERS_MAX = 50_000
# The kind that is recorded for consumers that take all kinds, or have not said which kinds they take.
ANY_KIND = ""

_Seen = tuple[OrgId | None, QueueName, str]


class ConsumersSeen:
    """What one router has seen of the consumers of one shard."""

    def __init__(self, database: Database, names: QueueIds) -> None:
        self._database = database
        self._names = names
        # Set while something is to be written.
        self.noted = asyncio.Event()
        self._to_write: dict[_Seen, None] = {}
        self._places = FairQuota(_NOTED_MAX)
        # The time at which each consumer was noted, by time.monotonic. The key is a hash of what the consumer asks for.
        # Two consumers with the same hash would count as one, which does no harm to a hint.
        self._noted_s: dict[int, float] = {}
        self._forgotten_s = -_FORGET_EVERY_S

    def note(self, org: OrgId | None, queues: Sequence[QueueName], kinds: Sequence[str]) -> None:
        """Notes that a consumer looks for jobs of these queues. `org`: None means the queues of all orgs. `kinds`: the
        kinds that the consumer takes; if empty, it takes all kinds."""
        consumer, now_s = hash((org, *queues, ANY_KIND, *kinds)), time.monotonic()
        if now_s - self._noted_s.get(consumer, -math.inf) < _AGAIN_S:
            return
        if len(self._noted_s) >= _CONSUMERS_MAX:
            self._noted_s.clear()
        self._noted_s[consumer] = now_s
        for queue in queues:
            for kind in kinds or (ANY_KIND,):
                seen = org, queue, kind
                if seen not in self._to_write and self._places.take(org):
                    self._to_write[seen] = None
        self.noted.set()

    async def write(self) -> None:
        """Writes the notes, except those about queues that do not exist yet. Raises ShardUnavailable: then the notes
        are lost, and the consumers are noted again within a minute."""
        noted, self._to_write = list(self._to_write), dict[_Seen, None]()
        self._places = FairQuota(_NOTED_MAX)
        self.noted.clear()
        began_s = time.monotonic()
        exist = await self._names.find({(org, queue) for org, queue, _ in noted if org is not None})
        seen = [one for one in noted if one[0] is not None and one[:2] in exist]
        of_all_orgs = [one[1:] for one in noted if one[0] is None]
        if len(seen) + len(of_all_orgs) < len(noted):
            # Forget when consumers were noted. So a consumer of a queue that does not exist yet is noted again when it
            # looks for jobs the next time.
            self._noted_s.clear()
        for at in range(0, len(seen), _ROWS_MAX):
            part = seen[at : at + _ROWS_MAX]
            orgs, queues, kinds = zip(*part, strict=True)
            parameters = {"orgs": arrays.texts(orgs), "queues": arrays.names(queues), "kinds": arrays.texts(kinds)}
            await self._database.run(statements.RECORD_CONSUMERS, parameters)
        for at in range(0, len(of_all_orgs), _ROWS_MAX):
            names, kinds = zip(*of_all_orgs[at : at + _ROWS_MAX], strict=True)
            parameters = {"queues": arrays.names(names), "kinds": arrays.texts(kinds)}
            await self._database.run(statements.RECORD_CONSUMERS_OF_ALL, parameters)
        if began_s - self._forgotten_s >= _FORGET_EVERY_S:
            self._forgotten_s = began_s
            await self._database.run(statements.FORGET_CONSUMERS, {})
