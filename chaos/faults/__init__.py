"""The faults that a run may draw. A new one is a subclass of Fault, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from chaos.faults import machine, network, processes, servers
from chaos.faults.fault import Fault

__all__ = ["FAULTS", "Fault"]

_KINDS: tuple[type[Fault], ...] = (
    processes.KillRouter,
    processes.FreezeRouter,
    processes.KillWorker,
    processes.FreezeWorker,
    processes.KillProducer,
    processes.FreezeProducer,
    servers.KillPostgres,
    servers.FreezePostgres,
    servers.KillBackend,
    servers.TerminateBackends,
    servers.ExhaustConnections,
    servers.FailOver,
    servers.FreezeStandby,
    network.CutConnections,
    network.SlowNetwork,
    network.SilentNetwork,
    network.ClosedNetwork,
    machine.FillDisk,
    machine.JumpClock,
    machine.BreakClusterFile,
)
FAULTS: Mapping[str, type[Fault]] = {kind.name: kind for kind in _KINDS}
