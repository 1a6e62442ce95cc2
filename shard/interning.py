"""Names ↔ numbers of one shard. A memory of what the database made; the enqueue and claim statements check every
number against its name, so that a wrong memory (a restored backup, another database behind the same DSN) is found,
never obeyed."""

from __future__ import annotations

from collections.abc import Collection

from shard import arrays, statements
from shard.database import Database
from shard.placement import slot_of
from shard.vocabulary import OrgId, QueueId, QueueName

_NAMES_MAX = 200_000


class Names:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue_ids: dict[tuple[OrgId, QueueName], QueueId] = {}

    async def find(self, org: OrgId, queues: Collection[QueueName]) -> dict[QueueName, QueueId]:
        """Those of the queues that exist."""
        found = {queue: known for queue in queues if (known := self._queue_ids.get((org, queue))) is not None}
        if len(found) < len(queues):
            missing = [queue for queue in queues if queue not in found]
            rows = await self._database.run(statements.FIND_QUEUE_IDS, {"org": org, "queues": missing})
            for name, queue_id in rows:
                found[name] = queue_id
                if len(self._queue_ids) >= _NAMES_MAX:
                    del self._queue_ids[next(iter(self._queue_ids))]
                self._queue_ids[org, name] = queue_id
        return found

    def known(self, org: OrgId, queues: Collection[QueueName]) -> list[QueueId]:
        """Those that are remembered, without asking the database."""
        return [known for queue in queues if (known := self._queue_ids.get((org, queue))) is not None]

    async def make(self, org: OrgId, queues: Collection[QueueName]) -> dict[QueueName, QueueId]:
        """All of the queues, bringing into being those that do not exist."""
        found = await self.find(org, queues)
        if len(found) < len(queues):
            missing = {
                "org": org,
                "slot": slot_of(org),
                "queues": [queue for queue in queues if queue not in found],
            }
            # Three statements, three transactions: each sees what rivals committed before it, and doing one twice
            # is harmless.
            await self._database.run(statements.INTERN_NAMES, missing)
            await self._database.run(statements.MAKE_QUEUES, missing)
            found = await self.find(org, queues)
        return found

    async def prove(self, queue_ids: Collection[QueueId]) -> None:
        """Forgets everything if one of these numbers is remembered for a queue that it does not name: claims would
        go on finding nothing there."""
        used = set(queue_ids)
        believed = [(number, *name) for name, number in self._queue_ids.items() if number in used]
        for at in range(0, len(believed), 1000):
            numbers, orgs, queues = zip(*believed[at : at + 1000], strict=True)
            parameters = {"queue_ids": arrays.numbers(numbers), "orgs": list(orgs), "queues": arrays.names(queues)}
            if await self._database.run(statements.FIND_WRONG_NAMES, parameters):
                self.forget()
                return

    def forget(self) -> None:
        """After a number proved wrong."""
        self._queue_ids.clear()
