"""Faults of the machine: a full disk, clocks that jump."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chaos.faults.fault import Fault, shards
from chaos.stage import Cast, Stage

_JUMP_S_MAX = 86_400.0


class FillDisk(Fault):
    """Fills the disk of the last shard. The shard's server may continue to work, refuse writes, or crash and not come
    up again."""

    name = "fill-disk"
    seconds = (2.0, 8.0)
    _filling: asyncio.Task[None] | None = None
    _enough = False

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return shards(cast)[-1:]

    @classmethod
    def missing(cls, stage: Stage) -> str | None:
        return None if stage.disk else "no disk can be made that is small enough: needs root, and the right to mount"

    async def inject(self) -> None:
        self._filling = asyncio.create_task(self._fill_again_and_again())

    async def heal(self) -> None:
        assert self.stage.disk is not None
        if self._filling is not None:
            # Do not cancel the task: its thread would continue, and might fill the disk again after the disk was
            # emptied.
            self._enough = True
            await self._filling
        await asyncio.to_thread(self.stage.disk.empty)
        node = self.stage.shards[self.target].primary
        # This does nothing if the server has recovered by itself.
        await node.start()

    async def _fill_again_and_again(self) -> None:
        assert self.stage.disk is not None
        while not self._enough:
            # Also fill the space that the server frees.
            await asyncio.to_thread(self.stage.disk.fill)
            await asyncio.sleep(0.1)


class JumpClock(Fault):
    """Sets the wall clock of all routers and balancers ahead or back, by up to a day."""

    name = "jump-clock"

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return ["clock"]

    @classmethod
    def missing(cls, stage: Stage) -> str | None:
        return None if stage.clock else "libfaketime is not installed"

    async def inject(self) -> None:
        assert self.stage.clock is not None
        self.stage.clock.jump(self.luck.uniform(-_JUMP_S_MAX, _JUMP_S_MAX))

    async def heal(self) -> None:
        assert self.stage.clock is not None
        self.stage.clock.jump(0)
