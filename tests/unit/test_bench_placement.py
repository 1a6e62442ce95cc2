"""The figures of the placement scenario: plans for up to 1,000 shards, and the load of the shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bench.report import to_json
from bench.scenario import Bench
from bench.scenarios import placement
from bench.scenarios.placement import Plan, changes_of, load_of, measure, populate
from bench.system import Wrong
from shard.placement.slots import SLOTS, plan, slot_of
from shard.vocabulary import OrgId, ShardName


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(cache=tmp_path, say=lambda _: None)


@pytest.mark.parametrize("shards", [2, 10, 100, 999, 1000])
def test_a_new_shard_moves_its_share_and_a_drained_one_what_it_has(shards: int) -> None:
    added, drained, heavier = changes_of(shards, jobs=1_000_000, rate=1000.0)
    assert 0 < added.moved <= 1.05 * SLOTS / (shards + 1)
    # If a shard is added, all moved load goes to it. If a shard is drained, all moved load comes from it.
    assert added.busiest == added.moved
    assert drained.busiest == drained.moved
    assert SLOTS // shards <= drained.moved <= SLOTS // shards + 1
    assert heavier.moved == heavier.least
    for change in (added, drained, heavier):
        assert max(change.apart) <= 1
        assert change.seconds == pytest.approx(change.busiest / SLOTS * 1000)


def test_the_only_shard_is_not_drained() -> None:
    assert [change.what for change in changes_of(1, jobs=1, rate=1.0)] == ["one more", "half of them twice as heavy"]


def test_a_plan_that_moves_too_much_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def afresh(owners: Sequence[ShardName | None], weights: Mapping[ShardName, float]) -> list[ShardName]:
        return plan([None] * len(owners), weights)

    monkeypatch.setattr(placement, "plan", afresh)
    with pytest.raises(Wrong, match="moves more than it must"):
        changes_of(10, jobs=1, rate=1.0)


async def test_orgs_lie_on_their_slots_and_the_largest_are_known(bench: Bench) -> None:
    population = await populate(3000, bench)
    assert sum(population.orgs) == 3000
    assert population.orgs[slot_of(OrgId("org-7"))] >= 1
    for tail, jobs in population.jobs.items():
        size, slot = max(population.largest[tail])
        # Every org counts as at least one job.
        assert sum(jobs) >= 3000
        assert 1 < size <= jobs[slot]


async def test_without_its_largest_orgs_a_cluster_is_more_even(bench: Bench) -> None:
    load = load_of(10, await populate(30_000, bench))
    assert load.slots == pytest.approx((1.0, 1.0), abs=0.001)
    assert load.orgs == pytest.approx((1.0, 1.0), abs=0.1)
    assert load.pinned["80/20"] > 0
    assert load.jobs_of_others["80/20"][1] < load.jobs["80/20"][1]


async def test_it_is_told_as_tables_samples_and_a_plot(bench: Bench) -> None:
    found = await measure(Plan(shards=(2, 20), orgs=1000, jobs=1000, rate=10.0), bench)
    assert [len(table.rows) for table in found.tables] == [2 * 3, 2]
    assert all(len(row) == len(table.head) for table in found.tables for row in table.rows)
    assert [plot.name for plot in found.plots] == ["placement-load"]
    told = json.loads(to_json([found], environment={}, failed={}))
    samples = told["scenarios"]["placement"]["samples"]
    assert [sample["sample"] for sample in samples] == ["change"] * 6 + ["load"] * 2
    assert samples[0]["moved"] == samples[0]["least"] == SLOTS // 3
