"""The errors of a shard, as a tree, each with what the caller can do about it. router/codec/status.py maps the
errors that routers meet to gRPC statuses.

ShardError
├── NoAnswer              the shard does not answer now: try again later
│   ├── TooManyWaiting    nothing was done: send less at a time
│   └── ShardUnavailable  a write that was sent may have been done
│       ├── InDoubt           the change may have been made: find out whether it was, or make a change that may
│       │                     be repeated
│       ├── RowLocked         try again, or end the transaction that holds the lock
│       ├── PlacementChanging try again: the org is moving to another shard
│       ├── ClockSetBack      try again; an operator corrects the server's clock, or accepts what it shows
│       └── DiskFull          an operator must free disk space first
├── NotOwned              this shard does not take the org's jobs, or has a later placement than the caller: read the
│                         placement, then start the call again (I6)
├── BadIds                make new ids
│   └── IdsOutsideHorizon the ids are too old, or too far in the future: make new ids
├── UnknownQueue          name another queue, or create this one
├── UnknownJob            name another job: the org has no job with this id, or no longer has it
├── QueueExists           update the queue instead
├── QueueNotEmpty         purge the queue first
├── TooManyQueues         use queues that the org has
├── TooManyRetentions     use a retention that the shard has
├── LimitReached          wait for `retry_after_s`; if it is None, send less at a time
├── TooManyQuarantines    release a kind first, or pause the queue
├── TooManyLimits         remove a limit first, or use a default
├── UnknownSchedule       name another schedule, or create this one
├── ScheduleExists        update the schedule instead
├── TooManySchedules      delete some first, or let one schedule do the work of several
├── BadSchedule           correct the field that it names
├── UnknownWorkflow       name another workflow
├── WorkflowExists        make another id: the org has a workflow with this id and other content
├── UnknownNode           name another node: the workflow has no node of this name
├── NodeEnded             nothing to do: the node has ended
├── NotSignalled          nothing to do: the node takes no signal, or no longer takes one
├── WorkflowEnded         start another workflow
├── LeaseEnded            nothing to do: another consumer may have the job, or nobody will run it any more
├── NodeMayWaitForJob     let the job wait for this node later, or not at all: the node waits for a node that may wait
│                         for the job
├── NodeExists            give the new node another name
├── TooManyNodes          start another workflow, or let one job do the work of several
├── NotRetryable          retry another workflow, or start a new one
├── TooManyWeights        set a weight back to 1 first
├── UnknownShard          name a shard that ListShards lists
├── SlotMoves             pin the org when its slot no longer moves
├── NotPinned             nothing to do: the org lives on the shard of its hash slot
├── UnknownApiKey         nothing to do: no key has this id
├── TooManyPins           pin no more orgs: all slots for pinned orgs are in use
├── OrgMoves              erase the org when no job of it is on its way to another shard
├── LegallyHeld           end the org's legal hold first, if that is intended
├── NotHeld               nothing to do: the org is under no legal hold
├── BadPageToken          start at the first page
└── Misconfigured         an operator must act: wrong database, schema too new, catalog of another cluster
    ├── ClocksDiffer      correct the clock that is wrong
    └── LostHistory       find a server that has the whole history, or accept the loss
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from shard.limits import Limit
from shard.vocabulary import (
    CATALOG,
    HORIZON_DAYS,
    RETENTIONS_MAX,
    STANDARD_RETENTIONS,
    JobId,
    Micros,
    OrgId,
    QueueName,
    ShardName,
    Slot,
)

_YEAR_10000_S = 253_402_300_800


def what(shard: ShardName) -> str:
    """Returns the shard as messages name it."""
    return "the catalog" if shard == CATALOG else f"shard {shard!r}"


class ShardError(Exception):
    """The root of the tree."""


class NoAnswer(ShardError):
    """The shard does not answer now. A call that asks several shards continues with the shards that answer."""


class TooManyWaiting(NoAnswer):
    """Too many calls are waiting, of this org or of all orgs; nothing was done."""

    retry_after_s = 0.5


class ShardUnavailable(NoAnswer):
    """The shard's database cannot be reached, or does not answer in time. A write that was sent may have been done."""

    _what = "is unavailable"

    def __init__(self, shard: ShardName, why: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{what(shard)} {self._what}: {why}")
        self.shard = shard
        self.why = why
        self.retry_after_s = retry_after_s


class InDoubt(ShardUnavailable):
    """The connection was lost before the answer to a change that must not be repeated. The change may have been
    made."""


class RowLocked(ShardUnavailable):
    """Another session of the database holds a lock that the call needs. Parts of the call that need no such lock may
    have been done."""

    _what = "cannot do this now"

    def __init__(self, shard: ShardName, row: str) -> None:
        super().__init__(
            shard,
            f"{row} is locked by another session of its database; try again. `windrow doctor --held-for 1s` names the "
            "sessions that keep a transaction open",
        )


class PlacementChanging(ShardUnavailable):
    """Every shard that was asked refused the org's jobs (NotOwned). This is normal while the org moves."""


class ClockSetBack(ShardUnavailable):
    _what = "takes no calls now"

    def __init__(self, shard: ShardName, why: str) -> None:
        super().__init__(shard, why, retry_after_s=5.0)


class DiskFull(ShardUnavailable):
    """`address`: the shard's database, as messages name it. `reason`: the error message of Postgres."""

    def __init__(self, shard: ShardName, address: str, reason: str) -> None:
        at = f" of the {address}" if address else ""
        super().__init__(shard, f"the disk{at} is full: {reason}; make room there, and the shard takes writes again")


class NotOwned(ShardError):
    """`state` and `epoch`: the slot's state on the shard, and the epoch since which it has that state. `known`: the
    epoch of the caller's placement."""

    def __init__(self, shard: ShardName, org: OrgId, slot: Slot, *, state: str, epoch: int, known: int) -> None:
        stale = f", and the caller knows the placement of epoch {known}" if state == "owned" else ""
        super().__init__(
            f"shard {shard!r} does not take jobs of org {org!r}: slot {slot} is {state} there (epoch {epoch}){stale}"
        )
        self.slot = slot
        self.epoch = epoch


class BadIds(ShardError):
    """The ids at these positions of the batch are not accepted; nothing was stored."""

    positions: list[int]

    def about(self, job_id: str) -> str:
        """Returns why this id, one of those at `positions`, is not accepted."""
        return str(self)


class IdsOutsideHorizon(BadIds):
    def __init__(self, positions: list[int], *, now: Micros) -> None:
        shards_time = datetime.fromtimestamp(now / 1e6, UTC)
        super().__init__(
            f"the time in an id must be at most {HORIZON_DAYS} days before and 1 hour after the shard's, which is "
            f"{shards_time:%Y-%m-%d %H:%M:%S} UTC: make a new id, and check the clock that ids are made by"
        )
        self.positions = positions
        self.now = now

    def about(self, job_id: str) -> str:
        made_s = int(job_id.replace("-", "")[:12], 16) // 1000
        # An id can hold times until the year 10889. A datetime can hold times only until the year 9999.
        when = (
            f"at {datetime.fromtimestamp(made_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
            if made_s < _YEAR_10000_S
            else "after the year 9999"
        )
        return f"{job_id} was made {when}; {self}"


class UnknownQueue(ShardError):
    def __init__(self, org: OrgId, queue: QueueName) -> None:
        super().__init__(f"org {org!r} has no queue {queue!r}")


class UnknownJob(ShardError):
    def __init__(self, org: OrgId, job_id: JobId) -> None:
        super().__init__(f"org {org!r} has no job {job_id}, or has it no longer")


class QueueExists(ShardError):
    def __init__(self, org: OrgId, queue: QueueName) -> None:
        super().__init__(f"org {org!r} already has a queue {queue!r}; update it instead")


class QueueNotEmpty(ShardError):
    def __init__(self, org: OrgId, queue: QueueName) -> None:
        super().__init__(
            f"queue {queue!r} of org {org!r} still holds live or dead jobs: purge it first, and let leased ones finish"
        )


class TooManyQueues(ShardError):
    """The org has no room for these new queues; nothing was stored."""

    def __init__(self, shard: ShardName, org: OrgId, queues: Collection[QueueName], *, queues_max: int) -> None:
        more = f" and {len(queues) - 1} more" if len(queues) > 1 else ""
        super().__init__(
            f"org {org!r} has {queues_max:,} queues on shard {shard!r}, the most that an org may have, and so no room "
            f"for {min(queues)!r}{more}: use those it has, and distinguish jobs by kind and attributes"
        )
        self.queues = queues


class TooManyRetentions(ShardError):
    """The shard has no room for one more retention; nothing was changed. The message does not name the retentions that
    other orgs have set (invariant I4)."""

    def __init__(self, shard: ShardName, retention: int, *, present: int) -> None:
        super().__init__(
            f"shard {shard!r} has {present} different retentions, and at most {RETENTIONS_MAX} may be set, so it "
            f"has no room for {retention} days: use one of {', '.join(map(str, STANDARD_RETENTIONS))} days"
        )


class LimitReached(ShardError):
    """A limit has no room for the jobs of an enqueue; nothing was stored. `asked` and `usage` are in the limit's
    measure. `retry_after_s`: after this time the limit may have room. None: the limit never has room for this call,
    because the call asks for more than the limit ever allows at once. `positions`: the jobs for which there is no room,
    if each job may be stored alone."""

    def __init__(
        self,
        org: OrgId,
        limit: Limit,
        *,
        asked: int,
        usage: int,
        retry_after_s: float | None,
        positions: Sequence[int],
    ) -> None:
        of = f"queue {limit.key.queue!r} of org {org!r}" if limit.key.queue else f"org {org!r}"
        why = (
            f"{usage:,} of them are in use, and the call has {asked:,}; try again in {retry_after_s:.3g} s"
            if retry_after_s is not None
            else f"the call has {asked:,} and can never succeed; send at most {limit.amount:,} at a time"
        )
        super().__init__(f"{of} may {'enqueue' if limit.key.measure.has_interval else 'have'} {limit}: {why}")
        self.limit = limit
        self.asked = asked
        self.usage = usage
        self.retry_after_s = retry_after_s
        self.positions = positions


class TooManyQuarantines(ShardError):
    def __init__(self, org: OrgId, *, kinds_max: int) -> None:
        super().__init__(
            f"org {org!r} has {kinds_max:,} quarantined kinds, the most that it may have: release some, or pause their "
            "queues"
        )


class TooManyLimits(ShardError):
    def __init__(self, *, limits_max: int) -> None:
        super().__init__(
            f"the cluster has {limits_max:,} limits, and may not have more: clear some, or set a default for all orgs"
        )


class UnknownSchedule(ShardError):
    def __init__(self, org: OrgId, schedule: str) -> None:
        super().__init__(f"org {org!r} has no schedule {schedule!r}")


class ScheduleExists(ShardError):
    def __init__(self, org: OrgId, schedule: str) -> None:
        super().__init__(f"org {org!r} already has a schedule {schedule!r}; update it instead")


class TooManySchedules(ShardError):
    def __init__(self, org: OrgId, *, schedules_max: int) -> None:
        super().__init__(
            f"org {org!r} has {schedules_max:,} schedules, the most that an org may have: delete some first"
        )


class UnknownWorkflow(ShardError):
    def __init__(self, org: OrgId, workflow: str) -> None:
        super().__init__(f"org {org!r} has no workflow {workflow}, or has it no longer")


class WorkflowExists(ShardError):
    def __init__(self, org: OrgId, workflow: str) -> None:
        super().__init__(f"org {org!r} has a workflow {workflow} with other content: make a new id")


class UnknownNode(ShardError):
    """`is_callback`: the workflow has a callback of this name, for which no node can wait."""

    def __init__(self, org: OrgId, workflow: str, node: str, *, is_callback: bool = False) -> None:
        ending = " that a node can wait for: it is a callback, which runs after the workflow" if is_callback else ""
        super().__init__(f"workflow {workflow} of org {org!r} has no node {node!r}{ending}")


class NodeEnded(ShardError):
    def __init__(self, workflow: str, node: str) -> None:
        super().__init__(f"node {node!r} of workflow {workflow} has ended")


class NotSignalled(ShardError):
    """`why`: a clause about the node."""

    def __init__(self, workflow: str, node: str, why: str) -> None:
        super().__init__(f"node {node!r} of workflow {workflow} takes no signal: {why}")


class WorkflowEnded(ShardError):
    """`how`: how the workflow ended, as a participle that follows "has"."""

    def __init__(self, workflow: str, how: str) -> None:
        super().__init__(f"workflow {workflow} has {how}, so no nodes can be added to it: start another one")


class LeaseEnded(ShardError):
    def __init__(self, job: str, workflow: str) -> None:
        super().__init__(
            f"this lease of job {job} has ended, or the job is not in workflow {workflow}: nothing was added; only a "
            "job that runs adds nodes to its workflow"
        )


class NodeMayWaitForJob(ShardError):
    """The job cannot wait for `node`: `node` waits for `parent`, and `parent` may wait for the job."""

    def __init__(self, workflow: str, node: str, parent: str) -> None:
        super().__init__(
            f"workflow {workflow}: the job waits for node {node!r}, so this node cannot wait for node {parent!r}. That "
            "node has not ended and is not among the nodes of this call: it might wait for the job"
        )


class NodeExists(ShardError):
    def __init__(self, workflow: str, node: str) -> None:
        super().__init__(
            f"workflow {workflow} has a node {node!r} that this job has not added: give the new node another name"
        )


class TooManyNodes(ShardError):
    """`what`: nodes, or edges between them."""

    def __init__(self, workflow: str, what: str, *, present: int, more: int, bound: int) -> None:
        super().__init__(
            f"workflow {workflow} has {present:,} {what}, and {more:,} more would exceed the {bound:,} that it may "
            "have: start another workflow, or let one job do the work of several"
        )


class NotRetryable(ShardError):
    """`why`: a clause about the workflow."""

    def __init__(self, workflow: str, why: str) -> None:
        super().__init__(f"workflow {workflow} cannot be retried: {why}")


class BadSchedule(ShardError):
    """A field of a request about a schedule breaks a rule that only the shard can check. `field`: the path of the
    field."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class TooManyWeights(ShardError):
    def __init__(self, *, weights_max: int) -> None:
        super().__init__(f"{weights_max:,} orgs have a weight, and no more may: set some of them back to 1")


class UnknownShard(ShardError):
    def __init__(self, shard: ShardName) -> None:
        super().__init__(f"the cluster has no shard {shard!r}: ListShards (`windrow shards`) names those it has")


class SlotMoves(ShardError):
    def __init__(self, org: OrgId, slot: Slot, reads: Sequence[ShardName]) -> None:
        super().__init__(
            f"org {org!r} is in slot {slot}, which is moving from shard {reads[0]!r} to {reads[-1]!r}: an org can be "
            "pinned only while its slot does not move; try again when the move has ended"
        )


class NotPinned(ShardError):
    def __init__(self, org: OrgId) -> None:
        super().__init__(f"org {org!r} is not pinned: it lives on the shard of its hash slot")


class UnknownApiKey(ShardError):
    """No API key has this id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"no API key has the id {key_id!r}; `windrow keys list` lists them")


class TooManyPins(ShardError):
    def __init__(self, org: OrgId, *, pins_max: int) -> None:
        super().__init__(
            f"org {org!r} cannot be pinned: {pins_max:,} orgs have a slot of their own, which is the maximum (an org "
            "keeps its slot when it is unpinned)"
        )


class OrgMoves(ShardError):
    def __init__(self, org: OrgId, shards: Sequence[ShardName]) -> None:
        way = " to ".join(map(repr, shards))
        super().__init__(f"jobs of org {org!r} are on their way from shard {way}; nothing was done: try again soon")


class LegallyHeld(ShardError):
    def __init__(self, org: OrgId, reason: str | None) -> None:
        super().__init__(f"org {org!r} is under legal hold: {reason}")


class NotHeld(ShardError):
    def __init__(self, org: OrgId) -> None:
        super().__init__(f"org {org!r} is under no legal hold")


class BadPageToken(ShardError):
    def __init__(self, token: str) -> None:
        shown = token if len(token) <= 64 else f"{token[:64]}…"
        super().__init__(f"{shown!r} is not a page token of this call: begin at the first page, without a token")


class Misconfigured(ShardError):
    """An operator must correct the configuration; the message says what is wrong."""


class ClocksDiffer(Misconfigured):
    """The clock of a database and the clock of this machine differ so much that one of them is wrong. Therefore nothing
    was deleted, not even what is old enough by the database's clock."""

    def __init__(self, shard: ShardName, *, shows: str, here: str) -> None:
        super().__init__(
            f"{what(shard)}: its clock shows {shows}, and the clock of this machine shows {here}; nothing is deleted "
            "by its clock before the wrong clock is corrected"
        )


class LostHistory(Misconfigured):
    """The shard's database lacks history that it had when the catalog confirmed the shard's last mark
    (shard/placement/marks.py)."""

    def __init__(self, shard: ShardName, address: str) -> None:
        super().__init__(f"shard {shard!r}: {lost_history(shard, address)}")


def lost_history(shard: ShardName, address: str) -> str:
    """Returns why a database that lacks a confirmed mark is refused."""
    return (
        f"its database ({address}) has lost history: it was restored from a backup, or is a standby that lagged when "
        f"it was promoted; find a server that has all of it, or accept the loss by `windrow shards accept {shard} "
        '--config FILE` (docs/operations.md, "A shard was restored from an old backup")'
    )
