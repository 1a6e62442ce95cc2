"""The context of every scenario: where peers are installed, where progress is reported, and which systems have
failed."""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.install import CannotInstall, install
from bench.report import Found
from bench.stage import Stage, open_stage
from bench.system import Wrong
from bench.systems import PEERS, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    cache: Path
    # Reports progress to people.
    say: Callable[[str], None]
    # Peers that failed, with the reason. The other systems are still measured.
    failed: dict[str, str] = field(default_factory=dict[str, str])
    # Facts about Postgres. Empty until a server has run.
    postgres: dict[str, object] = field(default_factory=dict[str, object])
    _stages: list[Stage] = field(default_factory=list[Stage])

    async def ready(self, systems: Sequence[str]) -> list[str]:
        """Installs the peers among these systems. Returns the systems that can be measured."""
        for peer in systems:
            if peer in PEERS and peer not in self.failed:
                try:
                    await asyncio.to_thread(install, self.cache, [peer], self.say)
                except (CannotInstall, OSError) as error:
                    self.fail(peer, error)
        return [system for system in systems if system not in self.failed]

    def fail(self, system: str, error: Exception) -> None:
        """Excludes a peer from the measurements that follow. Raises the error if the system is one of ours, which must
        not fail, or if the peer has failed before."""
        if system not in PEERS or system in self.failed:
            raise error
        self.failed[system] = f"{error}"
        self.say(f"{load(system).title} is left out from here on: {error}")

    async def attempt(self, system: str, act: Callable[[], Awaitable[None]]) -> None:
        """Calls `act`, unless the system has failed before."""
        if system in self.failed:
            return
        try:
            await act()
        except Wrong as error:
            self.fail(system, error)
            # End the failed peer: its work in the background would slow the other systems down.
            for stage in self._stages:
                await stage.drop(system)

    async def rounds(self, systems: Iterable[str], runs: int, turn: Callable[[str, int], Awaitable[None]]) -> None:
        """Calls `turn` for every system in each of `runs` rounds, with the number of the round. The first round has the
        number 1. Every second round has the reverse order."""
        order = list(systems)
        for run in range(1, runs + 1):
            for system in order if run % 2 else order[::-1]:
                await self.attempt(system, functools.partial(turn, system, run))

    def broken(self, scenario: str, why: str) -> None:
        """Records that a check of a scenario failed. The scenario's figures are then worthless. The report and the exit
        code show the failure."""
        self.failed[f"scenario {scenario}"] = why

    @asynccontextmanager
    async def stage(self, *, shards: int, routers: int, named: int | None = None) -> AsyncGenerator[Stage, None]:
        """Starts a cluster for this scope. `named`: how many of the shards the cluster file names at first; by default
        all."""
        self.say(f"starting {shards} shard(s) and {routers} router process(es)")
        async with open_stage(shards=shards, routers=routers, cache=self.cache, named=named) as stage:
            self.postgres.update(await stage.surroundings())
            self._stages.append(stage)
            try:
                yield stage
            finally:
                self._stages.remove(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One of the things that can be measured. Each scenario has a type of its own for its plans."""

    help: str
    options: Callable[[argparse.ArgumentParser], None]
    plan: Callable[[argparse.Namespace], Any]
    measure: Callable[[Any, Bench], Awaitable[Found]]
    # `full` makes the scenario's plan for `./run bench` with these peers, and `quick` makes it for `./run bench
    # --quick`. Each may return a tuple of several plans. None: that command does not run the scenario.
    full: Callable[[tuple[str, ...]], Any] | None
    quick: Callable[[], Any] | None
