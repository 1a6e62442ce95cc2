"""Moves slots step by step, for tests whose code does not run in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from balancer.move import Mover, Pace
from shard.placement import catalog, move_steps, pins
from shard.placement.catalog import Move
from shard.placement.pins import OnShard
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, ShardName, Slot

T = TypeVar("T")
_PACE = Pace(rest=0.0, poll_s=0.02)


class Shards:
    """Runs acts on the databases of a cluster. Opens a new connection for each act."""

    def __init__(self, dsns: Mapping[str, str]) -> None:
        self._dsns = dsns

    def run(self, act: Callable[[Mapping[ShardName, Database]], Awaitable[T]]) -> T:
        async def run() -> T:
            async with _databases(self._dsns) as databases:
                return await act(databases)

        return asyncio.run(run())


class _OpenShards(Shards):
    """Runs all acts on connections that stay open."""

    def __init__(self, runner: asyncio.Runner, databases: Mapping[ShardName, Database]) -> None:
        super().__init__({})
        self._runner = runner
        self._databases = databases

    def run(self, act: Callable[[Mapping[ShardName, Database]], Awaitable[T]]) -> T:
        async def run() -> T:
            return await act(self._databases)

        return self._runner.run(run())


@contextlib.contextmanager
def open_shards(dsns: Mapping[str, str]) -> Generator[Shards, None, None]:
    """Keeps connections open during the block, for modules whose tests take hundreds of steps: a new connection costs
    more than most steps."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        databases = runner.run(stack.enter_async_context(_databases(dsns)))
        try:
            yield _OpenShards(runner, databases)
        finally:
            runner.run(stack.aclose())


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """An org's slot that moves to `target`. Each method does one step of the move, like a balancer that ends after this
    step. The catalog is on s1."""

    shards: Shards
    slot: Slot
    epoch: int
    target: str

    def close(self) -> None:
        self._until(lambda move, states: states[0] == "draining")

    def open(self) -> None:
        self._until(lambda move, states: states[1] == "owned")

    def switch(self) -> None:
        self._until(lambda move, states: move.switched)

    def depart(self) -> None:
        """Call this after `switch`. Makes the jobs that may leave depart, so that no consumer can claim them."""

        async def act(databases: Mapping[ShardName, Database]) -> None:
            move, source = await self._move(databases)
            states = await move_steps.read_slots(source, move.slots)
            chunks = {slot: states[slot].chunk + 1 for slot in move.slots}
            assert await move_steps.export_chunk(source, chunks, epoch=self.epoch, rows_max=1000, bytes_max=1 << 20)

        self.shards.run(act)

    def take(self) -> None:
        """Call this after `depart`. Copies the jobs, so that both shards have them."""

        async def act(databases: Mapping[ShardName, Database]) -> None:
            move, source = await self._move(databases)
            departed = await move_steps.read_exported(source, move.slots, epoch=self.epoch)
            target = databases[move.target]
            assert await move_steps.import_chunk(target, departed, epoch=self.epoch)
            await move_steps.notify_imported(target, departed)

        self.shards.run(act)

    def finish(self) -> None:
        async def act(databases: Mapping[ShardName, Database]) -> None:
            await self._mover(databases).finish()

        self.shards.run(act)

    def _until(self, reached: Callable[[Move, tuple[str, str]], bool]) -> None:
        async def act(databases: Mapping[ShardName, Database]) -> None:
            mover = self._mover(databases)
            while True:
                move, source = await self._move(databases)
                states = [
                    there.state if (there := (await move_steps.read_slots(one, move.slots)).get(self.slot)) else ""
                    for one in (source, databases[move.target])
                ]
                if reached(move, (states[0], states[1])):
                    return
                assert await mover.step()

        self.shards.run(act)

    def _mover(self, databases: Mapping[ShardName, Database]) -> Mover:
        return Mover(databases[ShardName("s1")], databases, self.epoch, pace=_PACE, report=lambda _: None)

    async def _move(self, databases: Mapping[ShardName, Database]) -> tuple[Move, Database]:
        (move,) = [one for one in await catalog.moves(databases[ShardName("s1")]) if one.epoch == self.epoch]
        return move, databases[move.source]


def begin_move(dsns: Mapping[str, str], org: str, *, to: str) -> Moving:
    return begin_move_of(Shards(dsns), org, to=to)


def begin_move_of(shards: Shards, org: str, *, to: str) -> Moving:
    async def act(databases: Mapping[ShardName, Database]) -> Moving:
        known = await catalog.read(databases[ShardName("s1")])
        slot = known.slot(OrgId(org))
        move = await catalog.begin_move(databases[ShardName("s1")], known, [slot], target=ShardName(to))
        assert move is not None
        return Moving(shards=shards, slot=slot, epoch=move.epoch, target=to)

    return shards.run(act)


def pin(dsns: Mapping[str, str], org: str, *, to: str) -> None:
    """Pins the org, which gets a slot of its own. The slot is not moved yet."""

    async def act(databases: Mapping[ShardName, Database]) -> None:
        await pins.pin(databases[ShardName("s1")], OrgId(org), OnShard(ShardName(to)))

    Shards(dsns).run(act)


@contextlib.asynccontextmanager
async def _databases(dsns: Mapping[str, str]) -> AsyncGenerator[Mapping[ShardName, Database]]:
    async with contextlib.AsyncExitStack() as stack:
        databases: dict[ShardName, Database] = {}
        for name, dsn in dsns.items():
            databases[ShardName(name)] = database = Database(ShardName(name), dsn, connections=1)
            await database.open()
            stack.push_async_callback(database.close)
        yield databases
