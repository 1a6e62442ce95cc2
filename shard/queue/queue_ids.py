"""Maps queue names to the queue ids of one shard. The database makes the ids, and this module remembers them. The
enqueue and claim statements check every id against its name, so a wrong id (after a backup was restored, or with
another database behind the same DSN) is noticed and does no harm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from shard.bounded import make_room
from shard.errors import RowLocked, ShardUnavailable
from shard.placement import statements as placement_statements
from shard.placement.slots import slot_of
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import row_locks, statements
from shard.vocabulary import Micros, OrgId, QueueId, QueueName, ShardName

# Upper bound for the queues of one org on one shard. A queue's row is never deleted, so a program that invents names
# would add rows forever.
QUEUES_MAX = 10_000
_REMEMBERED_MAX = 200_000
# Queues per statement.
_BATCH_MAX = 1000
# How many times `find` and `make` try. They try again if two names have the same id, or if an org is erased meanwhile.
_TRIES_MAX = 6

# The full name of a queue: its org, and its name in the org.
Name = tuple[OrgId, QueueName]


class NewQueuesLocked(RowLocked):
    """These queues cannot be made now; the other queues of the call were made."""

    def __init__(self, shard: ShardName, names: Collection[Name]) -> None:
        org, queue = min(names)
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        super().__init__(
            shard, f"the org or the name of queue {queue!r} of org {org!r}{more}, which does not exist yet,"
        )
        self.names = names


class QueueIds:
    """The remembered queue ids of one shard. All methods that ask the database raise ShardUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue_ids: dict[Name, QueueId] = {}
        # The names of queues by their ids. A notification or a walk returns ids, whose names are then looked up.
        self._names: dict[QueueId, Name] = {}
        self._locks = row_locks.of_names(database)

    async def find(self, queues: Collection[Name]) -> dict[Name, QueueId]:
        """Returns the ids of the queues that exist. No two of these ids are equal."""
        for _ in range(_TRIES_MAX):
            found = {queue: known for queue in queues if (known := self._queue_ids.get(queue)) is not None}
            if len(found) < len(queues):
                found.update(await self._ask([queue for queue in queues if queue not in found]))
            if len(set(found.values())) == len(found):
                return found
            # Two names have the same id. One of them is remembered wrongly, but it is not known which.
            self.forget()
        raise ShardUnavailable(self._database.name, "the ids of its queues keep changing")

    async def _ask(self, queues: list[Name]) -> dict[Name, QueueId]:
        found: dict[Name, QueueId] = {}
        for at in range(0, len(queues), _BATCH_MAX):
            part = queues[at : at + _BATCH_MAX]
            for org, queue, queue_id in await self._database.run(statements.FIND_QUEUE_IDS, _columns(part)):
                make_room(self._queue_ids, _REMEMBERED_MAX)
                found[org, queue] = self._queue_ids[org, queue] = queue_id
        return found

    async def names_of(self, queue_ids: Collection[QueueId]) -> dict[QueueId, Name]:
        """Returns the names of the queues with these ids. Leaves out ids without a queue."""
        found = {number: name for number in queue_ids if (name := self._names.get(number)) is not None}
        missing = [number for number in queue_ids if number not in found]
        for at in range(0, len(missing), _BATCH_MAX):
            parameters = {"queue_ids": arrays.numbers(missing[at : at + _BATCH_MAX])}
            for number, org, queue in await self._database.run(statements.NAME_QUEUES, parameters):
                found[number] = org, queue
                self.remember(number, org, queue)
        return found

    def remember(self, queue_id: QueueId, org: OrgId, queue: QueueName) -> None:
        """Remembers that this queue has this id, which a statement has just returned."""
        make_room(self._queue_ids, _REMEMBERED_MAX)
        make_room(self._names, _REMEMBERED_MAX)
        self._queue_ids[org, queue] = queue_id
        self._names[queue_id] = org, queue

    def known(self, org: OrgId, queues: Collection[QueueName]) -> list[QueueId]:
        """Returns the ids that are remembered, without asking the database."""
        return [known for queue in queues if (known := self._queue_ids.get((org, queue))) is not None]

    async def make(
        self, queues: Collection[Name], *, check: Callable[[Micros], Awaitable[None]] | None = None
    ) -> dict[Name, QueueId]:
        """Returns the ids of these queues, and makes the queues that do not exist. A queue is missing from the result
        if its org already has QUEUES_MAX queues. `check` is called with the shard's time before any queue is made. If
        `check` raises an error, nothing is changed. Raises NewQueuesLocked."""
        # If an org is erased meanwhile, its new queues are erased too. The next try makes them again, for a new org of
        # that name.
        for _ in range(_TRIES_MAX):
            found = await self.find(queues)
            missing = [queue for queue in queues if queue not in found]
            fitting: list[Name] = []
            locked: set[Name] = set()
            for at in range(0, len(missing), _BATCH_MAX):
                part = await self._within_limit(missing[at : at + _BATCH_MAX], check=check)
                fitting += part
                locked |= await self._make(part, self._make_all)
            if len(locked) == len(fitting):
                if locked:
                    raise NewQueuesLocked(self._database.name, locked)
                return found
        raise ShardUnavailable(self._database.name, "orgs that need new queues are being erased; try again")

    async def make_names(self, queue: Name) -> bool:
        """Makes the rows that a new queue needs: the row of its org, and the row of its name. Returns False if its org
        already has QUEUES_MAX queues. Raises NewQueuesLocked."""
        if not await self.find([queue]) and not await self._within_limit([queue]):
            return False
        if locked := await self._make([queue], self._insert_names) | await self._locks.find([queue]):
            raise NewQueuesLocked(self._database.name, locked)
        return True

    async def _make(self, queues: list[Name], make: Callable[[list[Name]], Awaitable[None]]) -> set[Name]:
        """Calls `make` for these queues. Returns the queues that could not be made, because another session locks the
        row of their org or of their name."""
        locked = await self._locks.expect(queues)
        for _ in range(row_locks.TRIES_MAX):
            free = [queue for queue in queues if queue not in locked]
            if not free:
                return locked
            try:
                await make(free)
            except RowLocked:
                locked |= await self._locks.find(free)
            else:
                return locked
        raise RowLocked(self._database.name, "something that new queues need")

    async def _make_all(self, queues: list[Name]) -> None:
        # Use two transactions, so that the second transaction sees rows that other sessions have committed. Each of the
        # two statements may be repeated.
        await self._insert_names(queues)
        await self._database.run(placement_statements.INSERT_QUEUES, {**_columns(queues), "relisted": True})

    async def _insert_names(self, queues: list[Name]) -> None:
        # The slots are used only for orgs that have no row on this shard yet. An org that has a row keeps the slot of
        # that row. A pinned org without a row gets its hash slot now. It gets its own slot later, before one of these
        # two slots moves (shard/placement/pins.py).
        slots = {org: slot_of(org) for org, _ in queues}
        names = {
            "orgs": arrays.texts(list(slots)),
            "slots": arrays.numbers(slots.values()),
            "queues": arrays.names({queue for _, queue in queues}),
        }
        await self._database.run(placement_statements.INSERT_NAMES, names)

    async def _within_limit(
        self, queues: list[Name], *, check: Callable[[Micros], Awaitable[None]] | None = None
    ) -> list[Name]:
        """Returns the queues for which their orgs have room. Concurrent calls may exceed the limit by a few queues."""
        orgs = {org for org, _ in queues}
        parameters = {"orgs": arrays.texts(list(orgs)), "queues_max": QUEUES_MAX}
        counts: list[tuple[OrgId, int, Micros]] = await self._database.run(statements.COUNT_QUEUES, parameters)
        if check is not None:
            await check(counts[0][2])
        room = {org: QUEUES_MAX - count for org, count, _ in counts}
        fitting: list[Name] = []
        for org, queue in queues:
            if room[org]:
                room[org] -= 1
                fitting.append((org, queue))
        return fitting

    async def prove(self, queue_ids: Collection[QueueId]) -> None:
        """Checks these ids in the database. Forgets all ids if one of them is remembered for the wrong queue. Otherwise
        claims of that queue would find nothing."""
        checked = set(queue_ids)
        remembered = [(number, *name) for name, number in self._queue_ids.items() if number in checked]
        for at in range(0, len(remembered), _BATCH_MAX):
            numbers, orgs, queues = zip(*remembered[at : at + _BATCH_MAX], strict=True)
            parameters = {"queue_ids": arrays.numbers(numbers), "orgs": list(orgs), "queues": arrays.names(queues)}
            if await self._database.run(statements.FIND_WRONG_NAMES, parameters):
                self.forget()
                return

    def forget(self) -> None:
        """Forgets all ids. Call this when one of them is wrong."""
        self._queue_ids.clear()
        self._names.clear()


def _columns(queues: Collection[Name]) -> dict[str, object]:
    return {
        "orgs": arrays.texts([org for org, _ in queues]),
        "queues": arrays.names(queue for _, queue in queues),
    }
