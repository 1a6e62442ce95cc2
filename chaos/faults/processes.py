"""Faults that kill, freeze or restart processes: routers, balancers, workers, producers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import ClassVar

from chaos.faults.fault import Fault, pid_of, routers
from chaos.stage import Cast
from proof.postgres import until

_BACK_S_MAX = 60.0


class _OfRouters(Fault):
    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return routers(cast)


class _OfBalancers(Fault):
    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return cast.balancer_names


class _EndServer(Fault):
    seconds = (0.0, 0.0)
    signal: ClassVar[signal.Signals] = signal.SIGKILL
    _pid: int | None = None

    async def inject(self) -> None:
        self._pid = pid_of(self.stage, self.target)
        if self._pid is not None:
            os.kill(self._pid, self.signal)

    async def heal(self) -> None:
        # The supervisor starts another process, unless another fault prevents that.
        await until(self._is_back, f"another process runs in place of {self.target}", within_s=_BACK_S_MAX)

    def _is_back(self) -> bool:
        return pid_of(self.stage, self.target) not in {None, self._pid}


class FreezeServer(Fault):
    seconds = (1.0, 8.0)
    _pid: int | None = None

    async def inject(self) -> None:
        self._pid = pid_of(self.stage, self.target)
        self._send(signal.SIGSTOP)

    async def heal(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)


class _EndRouter(_OfRouters, _EndServer):
    def _is_back(self) -> bool:
        pids = self.stage.routers.pids
        return self._pid not in pids and len(pids) == self.stage.cast.routers


class KillRouter(_EndRouter):
    name = "kill-router"
    weight = 2.0


class RestartRouter(_EndRouter):
    """Sends SIGTERM: the router process waits for the end of the calls under way, and ends its streams. Then another
    process replaces it."""

    name = "restart-router"
    # The fault lasts this long, so that the router's clients connect again.
    seconds = (2.0, 4.0)
    signal = signal.SIGTERM
    alone = True


class FreezeRouter(_OfRouters, FreezeServer):
    name = "freeze-router"


class KillBalancer(_OfBalancers, _EndServer):
    name = "kill-balancer"
    weight = 2.0


class FreezeBalancer(_OfBalancers, FreezeServer):
    """Freezes a balancer, sometimes for so long that another balancer leads when the frozen balancer continues."""

    name = "freeze-balancer"
    weight = 1.5
    seconds = (1.0, 20.0)


class _KillClient(Fault):
    async def inject(self) -> None:
        await self.stage.crew.kill(self.target)

    async def heal(self) -> None:
        await self.stage.crew.start(self.target)


class _FreezeClient(Fault):
    # Some clients stay frozen for longer than the visibility window, so that they continue with leases that have ended.
    seconds = (1.0, 8.0)

    async def inject(self) -> None:
        self.stage.crew.send(self.target, signal.SIGSTOP)

    async def heal(self) -> None:
        self.stage.crew.send(self.target, signal.SIGCONT)


class _OfWorkers(Fault):
    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return cast.worker_names


class _OfProducers(Fault):
    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return cast.producer_names


class KillWorker(_OfWorkers, _KillClient):
    name = "kill-worker"
    weight = 2.0


class FreezeWorker(_OfWorkers, _FreezeClient):
    name = "freeze-worker"


class KillProducer(_OfProducers, _KillClient):
    name = "kill-producer"


class FreezeProducer(_OfProducers, _FreezeClient):
    name = "freeze-producer"
