"""How soon the balancer tries a failed move again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from balancer.controller import Controller
from balancer.move import Pace
from shard.placement.catalog import Move
from shard.vocabulary import ShardName, Slot


def a_move(*, switched: bool) -> Move:
    return Move(epoch=7, source=ShardName("s1"), target=ShardName("s2"), switched=switched, slots=(Slot(1),))


@pytest.mark.parametrize(("switched", "pauses"), [(False, [1.0] * 7), (True, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0])])
async def test_a_failed_move_is_tried_again_ever_more_rarely_but_not_while_its_slots_may_have_no_writer(
    caplog: pytest.LogCaptureFixture, switched: bool, pauses: list[float]
) -> None:
    controller = Controller(cast("Any", None), cast("Any", None), pace=Pace())
    for pause_s in pauses:
        caplog.clear()
        controller._pause(a_move(switched=switched), "the test says so", suspect=False)
        assert f"is tried again in {pause_s:g} s at the earliest" in caplog.text


async def test_the_next_pass_does_not_come_later_than_the_end_of_a_pause() -> None:
    controller = Controller(cast("Any", None), cast("Any", None), pace=Pace())
    idle_s = controller._idle_s()
    controller._pause(a_move(switched=False), "the test says so", suspect=False)
    assert 0 < controller._idle_s() <= 1 < idle_s
