"""Draws tokens from the buckets of one shard (docs/decisions/0045-tokens-are-drawn-in-blocks.md).

A bucket belongs to a limit and an org. It fills with time, by the shard's clock. Draws that come at the same time share
a statement. router/fleet/limits.py decides how much a router draws, and what it does with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shard.errors import RowLocked
from shard.limits import Limit
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.vocabulary import OrgId


class Draw(NamedTuple):
    """Asks for `wanted` tokens. If the bucket has fewer tokens, gets all of them. If it has fewer than `needed`, gets
    none. Negative numbers give tokens back."""

    org: OrgId
    limit: Limit
    needed: int
    wanted: int


class Drawn(NamedTuple):
    """What a draw got. `left`: how many tokens the bucket has after the draw. If tokens are given back, `granted` is
    negative. It is 0 if the bucket did not take the tokens back, because a newer version of the limit applies to it."""

    granted: int
    left: float
    # The version of the limit that applies to the bucket.
    version: int


class TokenBuckets:
    """The buckets of one shard."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Whether this process has drawn since it last deleted the rows of full buckets.
        self._has_drawn = False

    async def draw(self, draws: Sequence[Draw]) -> list[Drawn | Exception]:
        """Makes these draws. Returns the result or the error of each draw. If another session keeps a bucket locked,
        only the draws from that bucket fail."""
        self._has_drawn = True
        try:
            return list(await self._draw(draws))
        except RowLocked as error:
            if len(draws) == 1:
                return [error]
        return [answer for draw in draws for answer in await self.draw([draw])]

    async def _draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        limits = [draw.limit for draw in draws]
        gives_back = any(draw.wanted < 0 for draw in draws)
        rows = await self._database.run(
            statements.RETURN_TOKENS if gives_back else statements.DRAW_TOKENS,
            {
                "orgs": arrays.texts([draw.org for draw in draws]),
                "queues": arrays.texts([limit.key.queue for limit in limits]),
                "measures": arrays.names(limit.key.measure for limit in limits),
                "needed": arrays.numbers(draw.needed for draw in draws),
                "wanted": arrays.numbers(draw.wanted for draw in draws),
                "amounts": arrays.numbers(limit.amount for limit in limits),
                "intervals_us": arrays.numbers(limit.interval_us for limit in limits),
                "versions": arrays.numbers(limit.version for limit in limits),
            },
        )
        answers = {position: Drawn(granted, left, version) for position, granted, left, version in rows}
        return [answers[position] for position in range(1, len(draws) + 1)]

    async def forget_full(self) -> None:
        """Deletes the rows of full buckets, if this process has drawn since it last deleted such rows."""
        if self._has_drawn:
            self._has_drawn = False
            await self._database.run(statements.FORGET_FULL_BUCKETS, {})
