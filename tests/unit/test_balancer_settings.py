"""The [balancer] table: how fast jobs may move, and the messages about invalid tables."""

from __future__ import annotations

import pytest

from balancer.move import Pace
from balancer.settings import pace_of
from shard.placement.cluster_file import ClusterFileError
from tests.unit.test_cluster_file import ONE, parse


def test_without_a_table_a_move_has_its_own_pace() -> None:
    assert pace_of(parse(ONE)) == Pace()
    assert pace_of(parse(ONE + "[balancer]\n")) == Pace()


@pytest.mark.parametrize(("rate", "rows"), [(50, 50), (50_000, 1000)])
def test_a_limit_is_kept_in_steps_of_a_second_at_most(rate: int, rows: int) -> None:
    pace = pace_of(parse(f"{ONE}[balancer]\njobs_per_second = {rate}\n"))
    assert (pace.jobs_per_s_max, pace.rows_max, pace.rest) == (rate, rows, 0.0)


@pytest.mark.parametrize("value", ["0", "1.5", "true", '"many"', "1000001"])
def test_a_limit_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(
        ClusterFileError,
        match=r"cluster.toml: \[balancer\] jobs_per_second: must be a whole number from 1 to 1000000, not ",
    ):
        pace_of(parse(f"{ONE}[balancer]\njobs_per_second = {value}\n"))


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ClusterFileError, match="did you mean 'jobs_per_second'"):
        pace_of(parse(f"{ONE}[balancer]\njobs_per_sec = 5\n"))
