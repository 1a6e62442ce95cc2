"""Records which queues consumers look for on one shard, and which kinds they take, so that ExplainJob can say that nobody
takes a job. This is a hint (I7): nothing else reads it, and it is never truth.

A consumer is noted when it looks for jobs for the first time, and each minute while it is there. What was noted is
written at most once a second, and each queue and kind at most once a minute: the hot path only looks it up in memory. If
no consumer is there, nothing is noted, and so nothing is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.queue_ids import QueueIds
from shard.vocabulary import OrgId, QueueName

# How often consumers that stay are noted.
NOTE_S = 60.0
# The pause after each write.
PAUSE_S = 1.0
# A queue and kind that was written so long ago is written again. It is less than NOTE_S, so that each note counts, and
# more than the age from which record_consumers.sql writes a row again.
_AGAIN_S = 55.0
# How long a consumer that was seen counts as being there: a few notes may come late, or get lost.
SEEN_US = 180_000_000
_FORGET_EVERY_S = 3600.0
# Rows of one statement.
_ROWS_MAX = 1_000
# Further queues and kinds are not noted until these have been written.
_NOTED_MAX = 10_000
# With more, all are forgotten, and may be written again earlier than after a minute.
_WRITTEN_MAX = 50_000
# The kind of consumers that take all kinds, or have not said which.
ANY_KIND = ""

_Seen = tuple[OrgId, QueueName, str]


class ConsumersSeen:
    """What one router has seen of the consumers of one shard."""

    def __init__(self, database: Database, names: QueueIds) -> None:
        self._database = database
        self._names = names
        # Set while something is to be written.
        self.noted = asyncio.Event()
        self._to_write: dict[_Seen, None] = {}
        # When each was written, by time.monotonic.
        self._written_s: dict[_Seen, float] = {}
        self._forgotten_s = -_FORGET_EVERY_S

    def note(self, org: OrgId, queues: Iterable[QueueName], kinds: Sequence[str]) -> None:
        """A consumer looks for jobs of these queues. `kinds`: those that it takes; none: all."""
        now_s = time.monotonic()
        for queue in queues:
            for kind in kinds or (ANY_KIND,):
                seen = org, queue, kind
                written_s = self._written_s.get(seen)
                if written_s is not None and now_s - written_s < _AGAIN_S:
                    continue
                if len(self._to_write) < _NOTED_MAX:
                    self._to_write[seen] = None
                    self.noted.set()

    async def write(self) -> None:
        """Writes what was noted, without queues that do not exist yet. Raises ShardUnavailable: then it is lost, and noted
        again within a minute."""
        noted, self._to_write = list(self._to_write), dict[_Seen, None]()
        self.noted.clear()
        began_s = time.monotonic()
        exist = await self._names.find({(org, queue) for org, queue, _ in noted})
        seen = [one for one in noted if one[:2] in exist]
        for at in range(0, len(seen), _ROWS_MAX):
            part = seen[at : at + _ROWS_MAX]
            orgs, queues, kinds = zip(*part, strict=True)
            parameters = {"orgs": arrays.texts(orgs), "queues": arrays.names(queues), "kinds": arrays.names(kinds)}
            await self._database.run(statements.RECORD_CONSUMERS, parameters)
            if len(self._written_s) + len(part) > _WRITTEN_MAX:
                self._written_s.clear()
            self._written_s.update(dict.fromkeys(part, began_s))
        if began_s - self._forgotten_s >= _FORGET_EVERY_S:
            self._forgotten_s = began_s
            await self._database.run(statements.FORGET_CONSUMERS, {})
