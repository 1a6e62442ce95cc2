"""A shard's database goes back in time: an old copy of the database takes its place."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

import grpc

from chaos.faults.fault import Fault, shards
from chaos.faults.operators import open_catalog, pin, unpin
from chaos.stage import Cast
from proof import journal, processes, tables
from proof.checker.evidence import Health, Restored, Version
from proof.checker.refusal import REASON
from proof.postgres import Shard
from shard.errors import ShardUnavailable, SlotMoves
from shard.placement import catalog
from shard.vocabulary import OrgId

_BACKUP, _REPLACED = "windrow_backup", "windrow_replaced"
_AGE_S = (2.0, 8.0)
# The fault chooses three orgs among this many of the busiest orgs, so that jobs are lost.
_ORGS = 4
# In this share of the runs, the workers are stopped while the copy is made. They are stopped this long before the copy.
_BACKLOG_SHARE, _BACKLOG_S = 0.5, 3.0
# The pause before the replacement. Routers learn every 3 s which marks the catalog has confirmed.
_LEARN_S = (5.0, 10.0)
# In this share of the runs, a move is under way when the database is replaced.
_UNDER_WAY_SHARE = 0.6
_MOVED_S_MAX = 60.0
_MOVED_LOOK_S = 0.05
_LOOK_S = 0.2
_REFUSED_S_MAX = 20.0
_ASK_S_MAX = 3.0
_COMMAND_S_MAX = 60.0
_DONE_S_MAX = 120.0
_AGAIN_S = 1.0
# How long a command runs before it is killed, if it is killed at all. A command needs about a second to begin its work.
_KILLED_S = (0.5, 2.5)


class RestoreBackup(Fault):
    """Replaces a shard's database by an old copy. After the copy is made, jobs are stored, leased and settled on the
    shard, one org leaves the shard, and another org arrives. A third org may be moving. Routers refuse the shard until
    an operator accepts the loss. Then the stray jobs are moved to the shards of their orgs."""

    name = "restore-backup"
    # How long routers refuse the shard before an operator begins to accept the loss.
    seconds = (4.0, 8.0)
    drawn = False
    alone = True
    _asking: asyncio.Task[None] | None = None
    _backup: Version | None = None
    _copied_s = _swapped_s = 0.0
    # The time from which clients could reach the backup instead of the old database. 0: the database was not replaced.
    _back_s = 0.0

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        # Do not choose the first shard, because its database also has the catalog. The marks in the catalog would go
        # back in time too, so nobody would notice the loss. Do not choose the last shard of three or more, because it
        # may have a small disk.
        return shards(cast)[1:2]

    @property
    def _shard(self) -> Shard:
        return self.stage.shards[self.target]

    async def inject(self) -> None:
        self._told: list[Health] = []
        self.orgs = leaves, comes, moves = self.luck.sample(self.stage.cast.org_names[:_ORGS], 3)
        other = self.luck.choice([name for name in self.stage.shards if name != self.target])
        source, target = self.luck.sample([self.target, other], 2)
        await asyncio.gather(self._move(leaves, self.target), self._move(comes, other), self._move(moves, source))
        if self.luck.random() < _BACKLOG_SHARE:
            # Stop the workers, so that some jobs wait when the copy is made. These jobs leave the shard later, with
            # their org. After the replacement they are on the shard again.
            self._send(signal.SIGSTOP)
            await asyncio.sleep(_BACKLOG_S)
        await self._copy()
        await asyncio.sleep(self.luck.uniform(*_AGE_S))
        await asyncio.gather(self._move(leaves, other), self._move(comes, self.target))
        self._send(signal.SIGCONT)
        await asyncio.sleep(self.luck.uniform(*_LEARN_S))
        if self.luck.random() < _UNDER_WAY_SHARE:
            await self._move(moves, target, to_its_end=False)
        await self._swap()
        self.stage.say(f"{self.target} is as it was {self._swapped_s - self._copied_s:.1f} s ago")
        heard = asyncio.Event()
        self._asking = asyncio.create_task(self._ask(heard))
        # If no router refuses the shard, continue: the checker reports this.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REFUSED_S_MAX):
                await heard.wait()

    async def heal(self) -> None:
        accepting_s = time.monotonic()
        self._send(signal.SIGCONT)
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._back_s:
            assert self._backup is not None
            await self._until_done("accept", self.target, "--yes")
            accepted_s = time.monotonic()
            await self._until_done("recover", self.target)
            self.restored = Restored(
                shard=self.target,
                backup=self._backup,
                replaced=await asyncio.to_thread(_read, self._shard, _REPLACED),
                copied_s=self._copied_s,
                swapped_s=self._swapped_s,
                back_s=self._back_s,
                accepting_s=accepting_s,
                accepted_s=accepted_s,
                told=self._told,
            )
        for org in self.orgs:
            # If this move fails, the org stays where it is, which does no harm.
            with contextlib.suppress(ShardUnavailable, SlotMoves):
                match self.luck.randrange(3):
                    case 0:
                        await unpin(self.stage, org)
                    case 1:
                        await pin(self.stage, org, self.target)
                    case _:
                        pass

    # ── Before ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _move(self, org: str, there: str, *, to_its_end: bool = True) -> None:
        """Moves the org to a shard. Waits until the move is complete. If `to_its_end` is False, waits only until that
        shard stores the org's new jobs."""
        await pin(self.stage, org, there)
        give_up_s = time.monotonic() + _MOVED_S_MAX
        async with open_catalog(self.stage) as database:
            known = await catalog.read(database)
            while True:
                # Read only what has changed: a read of the whole catalog would delay the proxies, which run in this
                # process.
                known = await catalog.read(database, known)
                placement = known.placement(OrgId(org))
                if list(placement.reads if to_its_end else placement.writes) == [there]:
                    return
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"not within {_MOVED_S_MAX:g} s: {org} lives on {there}")
                await asyncio.sleep(_MOVED_LOOK_S)

    def _send(self, number: signal.Signals) -> None:
        for name in self.stage.cast.worker_names:
            self.stage.crew.send(name, number)

    async def _copy(self) -> None:
        with self._shard.entrance.closed():
            await self._shard.copy(_BACKUP)
            self._copied_s = time.monotonic()
        self._backup = await asyncio.to_thread(_read, self._shard, _BACKUP)

    async def _swap(self) -> None:
        with self._shard.entrance.closed():
            self._swapped_s = time.monotonic()
            await self._shard.replace_by(_BACKUP, old=_REPLACED)
            self._back_s = time.monotonic()

    async def _ask(self, refused: asyncio.Event) -> None:
        """Asks one router after another about the shard's health, and sets `refused` when a router refuses the
        shard."""
        while True:
            # A router that has lost connections may be busy, and fail to answer.
            with contextlib.suppress(grpc.RpcError):
                read = tables.read_health
                told = await asyncio.to_thread(read, self.stage.address, self.target, seconds_max=_ASK_S_MAX)
                self._told.append(told)
                if REASON in told.error:
                    refused.set()
            await asyncio.sleep(_LOOK_S)

    # ── What operators do ────────────────────────────────────────────────────────────────────────────────────────────

    async def _until_done(self, *command: str) -> None:
        """Runs `windrow shards …` again and again until it succeeds. The first run may be killed. Raises
        TimeoutError."""
        give_up_s = time.monotonic() + _DONE_S_MAX
        if self.luck.random() < 0.5:
            await self._killed(*command)
        while True:
            process = await self._start(*command)
            try:
                async with asyncio.timeout(_COMMAND_S_MAX):
                    _, said = await process.communicate()
            finally:
                await _end(process)
            if process.returncode == 0:
                return
            why = f"`windrow shards {' '.join(command)}` ended with {process.returncode}: {said.decode().strip()}"
            self.stage.say(why)
            if time.monotonic() > give_up_s:
                raise TimeoutError(why)
            await asyncio.sleep(_AGAIN_S)

    async def _killed(self, *command: str) -> None:
        process = await self._start(*command)
        try:
            async with asyncio.timeout(self.luck.uniform(*_KILLED_S)):
                await process.communicate()
        except TimeoutError:
            self.stage.say(f"`windrow shards {' '.join(command)}` is killed")
        finally:
            await _end(process)

    async def _start(self, *command: str) -> Process:
        config = str(self.stage.file.path)
        return await processes.start("cli.main", "shards", *command, "--config", config, stdin=DEVNULL, stderr=PIPE)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def _read(shard: Shard, database: str) -> Version:
    """Reads a database on the shard's server that no router uses."""
    dsn = shard.dsn_of(database)
    return Version(
        rows=list(tables.rows_in(dsn, shard.name)),
        keys=tables.keys_in(dsn),
        owned=journal.owned_in(dsn, shard.name),
        schedules=tables.schedules_in(dsn, shard.name),
        flows=frozenset(flow.workflow for flow in tables.flows_in(dsn, shard.name)),
    )
