"""Sets and reads the weights of orgs in the catalog. The parameter `database` is always the catalog's database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shard.admin import statements
from shard.errors import TooManyWeights
from shard.postgres.pool import Database
from shard.vocabulary import OrgId

# Upper bound for the number of weights, because routers read all weights when one weight has changed.
WEIGHTS_MAX = 10_000
# The weight of an org that has no weight of its own.
WEIGHT_DEFAULT = 1.0


class Weights(NamedTuple):
    """The weights of a cluster at a version. `of` has the orgs whose weight is not 1, by name."""

    version: int
    of: Mapping[OrgId, float]


async def set_weight(database: Database, org: OrgId, weight: float) -> None:
    """Sets the weight of an org, 0.001 to 1,000; the weight 1 removes the org's entry. Raises TooManyWeights."""
    parameters = {"org": org, "weight": None if weight == WEIGHT_DEFAULT else weight, "weights_max": WEIGHTS_MAX}
    if not await database.run(statements.SET_WEIGHT, parameters):
        raise TooManyWeights(weights_max=WEIGHTS_MAX)


async def read(database: Database) -> Weights:
    """Returns all weights."""
    rows = await database.run(statements.READ_WEIGHTS, {})
    return Weights(rows[0][0], {org: weight for _, org, weight in rows if org is not None})
