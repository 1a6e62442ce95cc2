"""The verbs that end or extend leases, for tests that run once for each verb."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from router.codec.lease_verbs import LeaseVerb
from shard.queue import statements
from shard.queue.settle import Nack, Settlement, Snooze
from shard.queue.store import Store
from shard.vocabulary import Answer, Failure, Lease, OrgId, Outcome
from tests.jobs import HOUR_US
from windrow.v1 import queue_pb2


def lease_request(verb: LeaseVerb, leases: Sequence[bytes], org: str) -> Any:
    """Returns the request of a verb's own method. The request has the leases and no other fields."""
    request: Any = getattr(queue_pb2, f"{verb.method}Request")(org=org)
    entries = getattr(request, verb.request_field)
    for lease in leases:
        if hasattr(entries, "add"):
            entries.add(lease=lease)
        else:
            entries.append(lease)
    return request


class Verb(NamedTuple):
    settlement: Callable[[OrgId, Sequence[Lease]], Settlement]
    # The statement that changes the jobs.
    statement: bytes
    # The state of a job afterwards.
    state: str
    # How the attempt ended. None: the attempt continues.
    outcome: Outcome | None

    def act(self, store: Store, org: OrgId, leases: Sequence[Lease]) -> Awaitable[list[Answer]]:
        return store.settle(self.settlement(org, leases))


VERBS = {
    "ack": Verb(Settlement.ack, statements.ACK, "succeeded", Outcome.ACKED),
    "nack": Verb(
        lambda org, leases: Settlement.nack(org, [Nack(lease=lease, retry_after_us=HOUR_US) for lease in leases]),
        statements.GIVE_BACK,
        "scheduled",
        Outcome.NACKED,
    ),
    "kill": Verb(
        lambda org, leases: Settlement.nack(
            org, [Nack(lease=lease, failure=Failure(permanent=True)) for lease in leases]
        ),
        statements.MARK_DEAD,
        "dead",
        Outcome.NACKED,
    ),
    "extend": Verb(
        lambda org, leases: Settlement.extend(org, leases, window_us=2 * HOUR_US), statements.EXTEND, "leased", None
    ),
    "snooze": Verb(
        lambda org, leases: Settlement.snooze(org, [Snooze(lease, HOUR_US, "not yet") for lease in leases]),
        statements.GIVE_BACK,
        "scheduled",
        Outcome.RELEASED,
    ),
    "release": Verb(Settlement.release, statements.GIVE_BACK, "ready", Outcome.RELEASED),
}
