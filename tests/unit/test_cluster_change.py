"""Changes of the cluster file while a process runs: which changes are refused, and what is reported about the rest."""

from __future__ import annotations

import pytest

from shard.placement.cluster_diff import described, refuse_change
from shard.placement.cluster_file import ClusterFileError
from tests.unit.test_cluster_file import DSN, ONE, PASSWORD, parse, two_shards

ELSEWHERE = '[catalog]\ndsn = "host=db9 sslmode=require"\n'
MOVED = (
    "cluster.toml: the catalog is somewhere else ([catalog], or without it the first [[shard]]), which needs a restart "
    "of every router; put it back, or start them again"
)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            ONE,
            '[cluster]\nname = "other"\n' + ONE,
            "cluster.toml: [cluster] name is 'other', and routers run that know it as 'windrow': it cannot be changed; "
            "put it back",
        ),
        (ONE, two_shards("").replace('"s1"', '"s3"'), MOVED),
        (ONE, ONE + ELSEWHERE, MOVED),
        (ONE + ELSEWHERE, ONE, MOVED),
        (ONE + ELSEWHERE, ONE + ELSEWHERE.replace("db9", "db8"), MOVED),
    ],
)
def test_what_a_running_process_cannot_go_over_to_is_refused(before: str, after: str, message: str) -> None:
    with pytest.raises(ClusterFileError) as caught:
        refuse_change(parse(before), parse(after))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE, two_shards("")),
        (ONE, ONE.replace("db1", "db7")),
        (two_shards(""), ONE),
        (ONE, ONE + f'[catalog]\ndsn = "{DSN}"\n'),
        (ONE + ELSEWHERE, two_shards('state = "off"') + ELSEWHERE),
        (ONE, ONE + "[router]\nprocesses = 5\n"),
    ],
)
def test_what_may_change_may_change(before: str, after: str) -> None:
    refuse_change(parse(before), parse(after))


def test_what_is_new_is_told_and_no_secret_with_it() -> None:
    before, after = (
        parse(two_shards("").replace('"s1"', '"s0"')),
        parse(
            ONE.replace("db1", "db7") + two_shards('weight = 3\nstate = "draining"\nlabels = { a = "b" }')[len(ONE) :]
        ),
    )
    told = described(before, after)
    assert told == [
        "shard 's1' is added",
        "shard 's2': its state is draining, and was active",
        "shard 's2': its weight is 3, and was 1",
        "shard 's2': its labels have changed",
        "shard 's0' is removed",
    ]
    moved = described(parse(ONE), parse(ONE.replace("db1", "db7")))
    assert moved == ["shard 's1': its DSN has changed"]
    assert PASSWORD not in str(told + moved)
    assert described(after, after) == []
