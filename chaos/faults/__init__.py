"""The faults from which a run chooses at random, and the changes by operators that it chooses in addition. A new fault
or change needs a subclass of Fault, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from chaos.faults import backups, machine, network, operators, peers, processes, servers
from chaos.faults.fault import Fault

__all__ = ["CHANGES", "FAULTS", "Fault"]

_KINDS: tuple[type[Fault], ...] = (
    processes.KillRouter,
    processes.FreezeRouter,
    processes.RestartRouter,
    operators.FreezeRouterInMove,
    processes.KillBalancer,
    processes.FreezeBalancer,
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
    servers.LockRows,
    network.CutConnections,
    network.SlowNetwork,
    network.SilentNetwork,
    network.ClosedNetwork,
    network.CutCatalog,
    peers.SlowReaders,
    peers.UnfinishedRequests,
    peers.RapidResets,
    machine.FillDisk,
    machine.JumpClock,
    operators.BreakClusterFile,
    operators.DrainShard,
    operators.ChangeWeight,
    operators.PinOrg,
    # RestoreBackup comes last, because clients may notice its effects for a long time. The faults that are run alone
    # are run in this order.
    backups.RestoreBackup,
)
FAULTS: Mapping[str, type[Fault]] = {kind.name: kind for kind in _KINDS}
# Changes harm nothing, so any number of them may be under way at the same time as faults.
CHANGES = frozenset({operators.DrainShard.name, operators.ChangeWeight.name, operators.PinOrg.name})
