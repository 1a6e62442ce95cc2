"""`windrow weights`: how orgs share the consumers that work for all of them."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import options, output
from cli.layout import App
from cli.output import Column

app = App(help="Sets how orgs share consumers that work for all of them.")


@app.command("set")
def set_weight(
    org: Annotated[str, typer.Argument(metavar="ORG", show_default=False, help="The org.")],
    weight: Annotated[
        float, typer.Argument(metavar="WEIGHT", show_default=False, help="0.001 to 1000. 1: as every other org.")
    ],
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Sets the weight of an org. It is in force on every router within 2 s, also for jobs that wait already.

    While several orgs have ready jobs, an org of weight 2 gets twice as much of the consumers' time as one of weight 1.
    """
    from cli.calls import connect
    from windrow.v1 import cluster_pb2

    with connect(address, timeout) as router:
        router.call(router.cluster.SetWeight, cluster_pb2.SetWeightRequest(org=org, weight=weight))
    output.note(output.visible(f"org {org} has the weight {weight:g}"))


@app.command("list")
def list_weights(
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists the orgs that have another weight than 1, by name."""
    from cli.calls import connect
    from windrow.v1 import cluster_pb2

    with connect(address, timeout) as router:
        found = router.call(router.cluster.ListWeights, cluster_pb2.ListWeightsRequest()).weights
    if as_json:
        output.say_json({"org": one.org, "weight": one.weight} for one in found)
    elif not found:
        output.note("every org has the weight 1")
    else:
        output.table(
            [Column(title="org"), Column(title="weight", right=True)], [(one.org, f"{one.weight:g}") for one in found]
        )
