"""A short run of the chaos suite on a small cluster: the parts of the suite work together, and the invariants hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos import figures, report, timeline
from chaos.run import Order, run
from chaos.stage import Cast
from embedded import BinariesNotFound
from proof.checker import check
from proof.environment import environment

SMALL = Cast(shards=2, replicated=False, routers=2, producers=1, workers=("consumer", "poller"), orgs=24, window_s=1.0)
FAULTS = (
    *("kill-router", "kill-worker", "kill-balancer", "kill-postgres", "cut-connections", "terminate-backends"),
    *("restart-router", "slow-readers", "unfinished-requests"),
    *("drain-shard", "change-weight", "pin-org"),
)

# There are enough schedules that some of them fire within the run.
STEADY = 500


@pytest.mark.timeout(240)
async def test_a_short_run_under_faults_keeps_every_invariant(tmp_path: Path) -> None:
    said: list[str] = []
    # The faults that this seed chooses: a killed router and balancer, a drained shard, a pinned org and a restarted
    # router.
    order = Order(seed=240, seconds=6.0, out=tmp_path, faults=FAULTS, cast=SMALL, steady_schedules=STEADY)
    try:
        told = await run(order, disk=None, say=said.append)
    except BinariesNotFound as error:
        pytest.skip(str(error))
    assert check(told.evidence) == []
    assert list(told.unhealed) == []
    assert len(told.strikes) >= 2, said
    assert not [strike.trouble for strike in told.strikes if strike.trouble]
    moves = figures.moves(told.evidence)
    assert moves
    assert all(move.ended_s is not None for move in moves)
    steady = {one.id for one in told.evidence.stored_schedules if one.name.startswith("steady-")}
    assert len(steady) == STEADY
    assert any(run.schedule_id in steady for run in told.evidence.runs)
    # The run had load, from every kind of client.
    assert len(told.evidence.rows) > 200
    clients = {call.client.partition(".")[0] for call in told.evidence.history.calls}
    assert clients == {"operator", "producer-1", "worker-1-consumer", "worker-2-poller"}
    report.write(tmp_path, order, told, [], environment())
    timeline.draw(tmp_path, told, said.append)
    assert {"report.json", "report.md", "timeline.png", "clients.log", "balancer-1.log", "histories"} <= set(
        os.listdir(tmp_path)
    )
