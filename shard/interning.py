"""Names ↔ numbers of one shard. A memory of what the database made; the enqueue and claim statements check every
number against its name, so that a wrong memory (a restored backup, another database behind the same DSN) is found,
never obeyed."""

from __future__ import annotations

from collections.abc import Collection

from shard import arrays, row_locks, statements
from shard.database import Database
from shard.errors import RowLocked, ShardUnavailable
from shard.placement import slot_of
from shard.vocabulary import OrgId, QueueId, QueueName, ShardName

# Of one org on one shard. A queue's row is never deleted, and a program that makes up names would make more for ever.
QUEUES_MAX = 10_000
_NAMES_MAX = 200_000
_ASKED_AT_ONCE = 1000
# How many times the database is asked anew after two names were found under one number.
_TURNS_MAX = 6

# A queue's: its org's, and its own in that org.
Name = tuple[OrgId, QueueName]


class NamesLocked(RowLocked):
    """These queues cannot be made now; the others that were asked for are."""

    def __init__(self, shard: ShardName, names: Collection[Name]) -> None:
        org, queue = min(names)
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        super().__init__(
            shard, f"the org or the name of queue {queue!r} of org {org!r}{more}, which does not exist yet,"
        )
        self.names = names


class Names:
    """All verbs that ask the database raise ShardUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue_ids: dict[Name, QueueId] = {}
        self._locks = row_locks.of_names(database)

    async def find(self, queues: Collection[Name]) -> dict[Name, QueueId]:
        """The numbers of those queues that exist, no two the same."""
        for _ in range(_TURNS_MAX):
            found = {queue: known for queue in queues if (known := self._queue_ids.get(queue)) is not None}
            if len(found) < len(queues):
                found.update(await self._ask([queue for queue in queues if queue not in found]))
            if len(set(found.values())) == len(found):
                return found
            # Two names, one number: one of them is remembered wrongly, and there is no telling which.
            self.forget()
        raise ShardUnavailable(self._database.name, "its queues keep changing their numbers")

    async def _ask(self, queues: list[Name]) -> dict[Name, QueueId]:
        told: dict[Name, QueueId] = {}
        for at in range(0, len(queues), _ASKED_AT_ONCE):
            part = queues[at : at + _ASKED_AT_ONCE]
            for org, queue, number in await self._database.run(statements.FIND_QUEUE_IDS, _columns(part)):
                if len(self._queue_ids) >= _NAMES_MAX:
                    del self._queue_ids[next(iter(self._queue_ids))]
                told[org, queue] = self._queue_ids[org, queue] = number
        return told

    def known(self, org: OrgId, queues: Collection[QueueName]) -> list[QueueId]:
        """Those that are remembered, without asking the database."""
        return [known for queue in queues if (known := self._queue_ids.get((org, queue))) is not None]

    async def make(self, queues: Collection[Name]) -> dict[Name, QueueId]:
        """The numbers of all of these queues. Makes those that do not exist, except for orgs that have as many as an
        org may have: only their queues are missing from the answer. Raises NamesLocked."""
        # An org that is erased meanwhile takes its new queues with it. They are made again, for the org that comes
        # after.
        for _ in range(_TURNS_MAX):
            found = await self.find(queues)
            missing = [queue for queue in queues if queue not in found]
            fitting: list[Name] = []
            locked: set[Name] = set()
            for at in range(0, len(missing), _ASKED_AT_ONCE):
                part = await self._with_room(missing[at : at + _ASKED_AT_ONCE])
                fitting += part
                locked |= await self._make(part)
            if len(locked) == len(fitting):
                if locked:
                    raise NamesLocked(self._database.name, locked)
                return found
        raise ShardUnavailable(self._database.name, "orgs that need new queues are being erased; try again")

    async def _make(self, queues: list[Name]) -> set[Name]:
        """Answers those that could not be made, because another session keeps a row locked that they need."""
        locked = await self._locks.expect(queues)
        for _ in range(row_locks.TURNS_MAX):
            free = [queue for queue in queues if queue not in locked]
            if not free:
                return locked
            try:
                await self._make_all(free)
            except RowLocked:
                locked |= await self._locks.find(free)
            else:
                return locked
        raise RowLocked(self._database.name, "something that new queues need")

    async def _make_all(self, queues: list[Name]) -> None:
        # The slot is for an org that is not known here. A pinned one has a row with its own slot, which stays; or it is
        # put there before anything moves (shard/pinning.py).
        slots = {org: slot_of(org) for org, _ in queues}
        names = {
            "orgs": arrays.texts(list(slots)),
            "slots": arrays.numbers(slots.values()),
            "queues": arrays.names({queue for _, queue in queues}),
        }
        # Each in a transaction of its own sees what rivals committed before it, and doing it twice is harmless.
        await self._database.run(statements.INTERN_NAMES, names)
        await self._database.run(statements.MAKE_QUEUES, {**_columns(queues), "relisted": True})

    async def _with_room(self, queues: list[Name]) -> list[Name]:
        """Those that their orgs may have. Rivals that look at the same moment may make a few more."""
        orgs = {org for org, _ in queues}
        parameters = {"orgs": arrays.texts(list(orgs)), "queues_max": QUEUES_MAX}
        room = {org: QUEUES_MAX - there for org, there in await self._database.run(statements.COUNT_QUEUES, parameters)}
        fitting: list[Name] = []
        for org, queue in queues:
            if room[org]:
                room[org] -= 1
                fitting.append((org, queue))
        return fitting

    async def prove(self, queue_ids: Collection[QueueId]) -> None:
        """Forgets everything if one of these numbers is remembered for a queue that it does not name: claims would
        go on finding nothing there."""
        used = set(queue_ids)
        believed = [(number, *name) for name, number in self._queue_ids.items() if number in used]
        for at in range(0, len(believed), _ASKED_AT_ONCE):
            numbers, orgs, queues = zip(*believed[at : at + _ASKED_AT_ONCE], strict=True)
            parameters = {"queue_ids": arrays.numbers(numbers), "orgs": list(orgs), "queues": arrays.names(queues)}
            if await self._database.run(statements.FIND_WRONG_NAMES, parameters):
                self.forget()
                return

    def forget(self) -> None:
        """After a number proved wrong."""
        self._queue_ids.clear()


def _columns(queues: Collection[Name]) -> dict[str, object]:
    return {
        "orgs": arrays.texts([org for org, _ in queues]),
        "queues": arrays.names(queue for _, queue in queues),
    }
