"""The protocol that moves a slot, as a model small enough to visit every reachable state.

docs/decisions/0017-moving-slots.md describes what each step writes; here each step is a function from a state to the
next. `Rule` names the rules that keep a move safe. If any one rule is left out, the search must find a violation
(tests/property/test_move_model.py).

The model has one slot, two shards and the catalog. The slot moves to the other shard, back, and to the other shard
again.

- Producers repeat a job, or send another job with its dedup key. They do so at any time, through routers with any past
  or present placement. They also send a job whose dedup key has been taken by another job. A call has three steps: it
  asks the former owners, its statement takes a snapshot, and it commits. Other processes can run between these steps.
- Consumers claim wherever a job is visible. Consumers ack and nack jobs, and lose leases. Jobs die, are redriven and
  cancelled.
- One balancer has no memory, and may crash and restart between any two steps. Other balancers wrongly believe that they
  are the leader. Each of them decides on a step, freezes, and runs the step at any later time, or never.
- Routers start, and grant slots to shards according to an old catalog. Callers change a queue's configuration and look
  jobs up by id, through routers with any old placement.

The model has at most two jobs, one slot, two shards, three moves and two frozen balancers. The model has no time. In
production, a router does not ask a former owner about an id that is too new for that shard. The model leaves this out,
because it only saves a question. A dedup window has ended before the beginning, or never ends. Databases work
correctly: a commit is durable. A statement is one step, unless the decision record says that it is two steps. Of a
lease token, the model has only the shard that the token names. A claim may take any job. The configuration does not
change on the source while slots leave it. Orgs that get a slot of their own are in tests/models/pins.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple, NewType, assert_never

from tests.models.exploration import Explored, visit


class Rule(enum.Enum):
    """The rules that keep a move safe."""

    ENQUEUES_NEED_AN_OWNED_SLOT = "a shard stores jobs only of a slot that is its own"
    ENQUEUES_COMPARE_EPOCHS = "a shard stores jobs only for a router that knows how the slot came to it"
    FORMER_OWNERS_ARE_ASKED = "a router asks former owners for ids and dedup keys, before the writer stores anything"
    IDS_COME_FIRST = "a router answers by a dedup key only when no shard knows the id"
    ONE_PLACEMENT_A_CALL = "a call is stored under the placement by which former owners were asked"
    LEAVING_JOBS_ARE_KNOWN = "who asks for an id is also told of jobs that are leaving"
    CLOSING_WAITS = "a shard is closed while no enqueue is under way that found it open"
    OPEN_AFTER_CLOSE = "the target is opened after the source was closed"
    SWITCH_AFTER_OPEN = "the catalog names the target as the writer after it was opened"
    LEAVING_JOBS_ARE_INVISIBLE = "a job that is leaving cannot be claimed"
    LEASED_JOBS_STAY = "a job under a lease does not leave"
    DEAD_JOBS_MOVE = "dead jobs move too"
    COPY_BEFORE_DELETE = "a chunk is deleted on the source after it was stored on the target"
    LEAVE_WHEN_EMPTY = "the source is read until no job of the slot is left there"
    BOOKS_MOVE = "the tally moves with the jobs"
    GRANTS_AT_REST = "a router tells shards what they own only of slots at rest"
    CLOSED_STAYS_WRITTEN = "a shard never forgets that it closed a slot, and under which epoch"
    BEGIN_IS_FENCED = "beginning a move compares the catalog's epoch"
    CLOSE_IS_FENCED = "closing compares the source's epoch"
    OPEN_IS_FENCED = "opening, and copying the configuration, compares the target's epoch"
    SWITCH_IS_FENCED = "switching compares the catalog's epoch"
    DEPARTING_COMPARES_EPOCHS = "a chunk departs only under the epoch of the move"
    DEPARTING_COMPARES_CHUNKS = "a chunk departs only if its number is the next"
    TAKING_COMPARES_EPOCHS = "a chunk is taken only under the epoch of the move"
    TAKING_COMPARES_CHUNKS = "a chunk is taken only if its number is the next"
    FORGETTING_IS_FENCED = "a chunk is deleted by the epoch and the number under which it departed"
    LEAVE_IS_FENCED = "ending a move compares the catalog's epoch"
    LOOKUPS_FOLLOW_THE_JOB = "a lookup asks the source before the target"
    NOT_FOUND_IS_CURRENT = "a job is said not to exist only by who knows the placement as it is"


EVERY_RULE = frozenset(Rule)

# A shard, by its number.
Place = NewType("Place", int)
_PLACES = (Place(0), Place(1))
_NAMES = ("A", "B")


class Leaving(NamedTuple):
    """A row of windrow.departing, which no reader sees. The row is copied to the target, and then deleted."""

    epoch: int
    chunk: int
    dead: bool


# The table and state in which a shard has a job. "ready" includes scheduled jobs.
Row = Literal["absent", "ready", "leased", "dead", "finished"] | Leaving
_ABSENT: Row = "absent"
_READY: Row = "ready"


class Shard(NamedTuple):
    """One database: what it knows about the slot."""

    # The state in the shard's row of windrow.owned_slot; "unknown": there is no row.
    state: Literal["unknown", "owned", "draining"]
    epoch: int
    # The number of the last chunk that this shard exported or imported.
    chunk: int
    # One row for each job.
    rows: tuple[Row, ...]
    # The keys in windrow.dedup. They stay when jobs leave.
    keys: frozenset[str]
    # The sum of windrow.tally.
    accepted: int
    # Stands for the configuration of the slot's queues.
    paused: bool


class Placement(NamedTuple):
    """One version of the catalog's row."""

    epoch: int
    writer: Place
    # The shards in the order in which jobs travel: one shard at rest, and the source and the target during a move.
    reads: tuple[Place, ...]
    former: frozenset[Place]

    @property
    def at_rest(self) -> bool:
        return len(self.reads) == 1


class Call(NamedTuple):
    """A call that waits in its router or in Postgres. Other processes can run before the call continues."""

    # "asked": the former owners do not know the job. "admitted": a snapshot found the slot owned, and the call will
    # commit. "looking": the shards asked so far do not know the job.
    stage: Literal["asked", "admitted", "looking"]
    # The job; None: the call changes the configuration.
    job: int | None
    place: Place
    # The epoch with which the router's placement names the writer. After the call is admitted, this field is not used.
    epoch: int = 0
    # Only for a lookup: `others` are the shards that the lookup has not asked yet, and `version` is how many placements
    # there were when it began.
    others: tuple[Place, ...] = ()
    version: int = 0


class Step(NamedTuple):
    """The step that a balancer has decided to do next, with the data that it read for this decision."""

    do: Literal["begin", "close", "open", "switch", "depart", "take", "forget", "leave"]
    epoch: int
    source: Place
    target: Place
    chunk: int = 0
    # The jobs of a chunk, and whether each is dead.
    jobs: tuple[tuple[int, bool], ...] = ()
    paused: bool = False

    def __str__(self) -> str:
        source, target, epoch = _NAMES[self.source], _NAMES[self.target], f"epoch {self.epoch}"
        chunk = f"chunk {self.chunk} of {epoch}"
        match self.do:
            case "begin":
                return f"begin: the catalog says that the slot goes from {source} to {target}, {epoch}"
            case "close":
                return f"close: {source} takes no more jobs, {epoch}"
            case "open":
                return f"open: {target} has the configuration and takes jobs, {epoch}"
            case "switch":
                return f"switch: the catalog says that {target} writes, {epoch}"
            case "depart":
                return f"depart: {_jobs(self.jobs)} leaves {source} as {chunk}"
            case "take":
                return f"take: {target} stores {_jobs(self.jobs)}, {chunk}"
            case "forget":
                return f"forget: {source} deletes {chunk}"
            case "leave":
                return f"leave: the catalog says that {target} alone is read, {epoch}"
            case _:
                assert_never(self.do)


class State(NamedTuple):
    # All placements so far. The last one is in the catalog.
    history: tuple[Placement, ...]
    shards: tuple[Shard, Shard]
    # The calls are sorted, because all routers are alike, and so the order of the calls does not matter.
    calls: tuple[Call, ...]
    # The steps on which other balancers decided before they froze.
    frozen: tuple[Step, ...]
    # How often each job was stored as a live job.
    stored: tuple[int, ...]
    # The shards where consumers hold live leases on each job.
    held: tuple[frozenset[Place], ...]
    # Whether the last answer to the operator said that the queue is paused.
    told_paused: bool
    # A violation that has happened; empty if none has.
    wrong: str

    @property
    def placement(self) -> Placement:
        return self.history[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The processes and jobs of an exploration. Each scenario is small, so that all are explored within seconds."""

    name: str
    # The dedup key of each job.
    keys: tuple[str | None, ...] = (None,)
    # Whether the jobs exist from the beginning. Otherwise they are enqueued later.
    jobs_exist: bool = False
    # Whether the first job exists from the beginning and the window of its dedup key has ended, so that another job may
    # take the key.
    key_is_free: bool = False
    # How many calls of routers may wait at the same time.
    calls: int = 0
    moves: int = 2
    # How many balancers may be frozen at the same time, besides the active one.
    frozen: int = 1
    configures: bool = False
    looks_up: bool = False


SCENARIOS = (
    Scenario(name="a queue is paused", keys=(), calls=2, configures=True),
    Scenario(name="a job is looked up", jobs_exist=True, calls=1, looks_up=True),
    Scenario(name="a job moves there, back and there again", jobs_exist=True, moves=3, frozen=2),
    Scenario(name="two jobs move in chunks", keys=(None, None), jobs_exist=True),
    Scenario(name="two jobs are enqueued under one dedup key", keys=("k", "k"), calls=2),
    Scenario(name="a job is enqueued again and again", calls=2, frozen=2),
    Scenario(
        name="a job is enqueued again whose key another job has taken",
        keys=("k", "k"),
        key_is_free=True,
        calls=1,
        frozen=0,
    ),
)


def explore(scenario: Scenario, rules: frozenset[Rule] = EVERY_RULE) -> Explored:
    """Visits every state that can be reached under these rules."""
    return visit(scenario.name, _Model(scenario, rules))


class _Model:
    def __init__(self, scenario: Scenario, rules: frozenset[Rule]) -> None:
        self._scenario = scenario
        self._rules = rules
        self._jobs = range(len(scenario.keys))

    def start(self) -> State:
        exist = tuple(self._scenario.jobs_exist or (self._scenario.key_is_free and job == 0) for job in self._jobs)
        new = Shard("unknown", 0, 0, (_ABSENT,) * len(exist), frozenset(), 0, paused=False)
        rows = tuple(_READY if there else _ABSENT for there in exist)
        owner = new._replace(state="owned", epoch=1, rows=rows, accepted=sum(exist))
        return State(
            history=(Placement(1, _PLACES[0], _PLACES[:1], frozenset()),),
            shards=(owner, new),
            calls=(),
            frozen=(),
            stored=tuple(map(int, exist)),
            held=(frozenset(),) * len(exist),
            told_paused=False,
            wrong="",
        )

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields every possible next event."""
        if len(state.calls) < self._scenario.calls:
            if self._scenario.looks_up:
                for job in self._jobs:
                    yield from self._begin_lookups(state, job)
            else:
                yield from self._begin_calls(state)
        yield from self._go_on_with_calls(state)
        yield from self._consume(state)
        yield from self._grant(state)
        yield from self._balance(state)

    # ── What must hold ───────────────────────────────────────────────────────────────────────────────────────────────

    def broken(self, state: State) -> str | None:
        """Returns the invariant that this state violates, if any."""
        if state.wrong:
            return state.wrong
        if all(shard.state == "owned" for shard in state.shards):
            return "I6: both shards take jobs of the slot"
        for job, count in enumerate(state.stored):
            if count > 1:
                return f"I3: {_job(job)} was stored twice"
        keyed = [count for count, key in zip(state.stored, self._scenario.keys, strict=True) if key is not None]
        if sum(keyed) > 1 and not self._scenario.key_is_free:
            return "I3: two jobs were stored under one dedup key"
        for job in self._jobs:
            rows = [shard.rows[job] for shard in state.shards]
            if sum(row != "absent" and not isinstance(row, Leaving) for row in rows) > 1:
                return f"I2: {_job(job)} is on both shards"
            if len(state.held[job]) > 1:
                return f"I2: there are two leases on {_job(job)}"
            if state.stored[job] and all(row == "absent" for row in rows):
                return f"I1: {_job(job)} is nowhere"
            if any(rows[at] not in ("absent", "finished") for at in _PLACES if at not in state.placement.reads):
                return f"I1: {_job(job)} is where nobody reads"
        for name, shard in zip(_NAMES, state.shards, strict=True):
            if shard.accepted != sum(row != "absent" for row in shard.rows):
                return f"I5: the books of {name} do not balance"
            if shard.state == "owned" and shard.paused != state.told_paused:
                return f"I6: {name} has another configuration than the operator was told"
        return None

    def is_over(self, state: State) -> bool:
        """Returns whether nothing is left to do."""
        rows = [row for shard in state.shards for row in shard.rows]
        return state.placement.at_rest and not state.calls and all(row in ("absent", "finished") for row in rows)

    # ── Routers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_calls(self, state: State) -> Iterator[tuple[str, State]]:
        """Calls begin with any past or present placement, because a router's copy may be that old."""
        for (epoch, writer), former in {(known.epoch, known.writer): known.former for known in state.history}.items():
            others = former - {writer} if Rule.FORMER_OWNERS_ARE_ASKED in self._rules else frozenset[Place]()
            for job in self._jobs:
                call = Call("asked", job, writer, epoch)
                if not others:
                    # There is no former owner to ask, so the call is admitted at once.
                    yield from self._admit(state, call, state.calls)
                elif not any(self._knows(state.shards[at], job) for at in others):
                    what = f"a router that knows epoch {epoch} asks the former owner, which does not know {_job(job)}"
                    yield what, _with_call(state, state.calls, call)
                elif not any(self._has(state.shards[at], job) for at in others):
                    yield from self._begin_with_key(state, job)
            if self._scenario.configures and not state.told_paused:
                yield from self._admit(state, Call("asked", None, writer, epoch), state.calls)

    def _begin_with_key(self, state: State, job: int) -> Iterator[tuple[str, State]]:
        """Called if a former owner knows the job only by its dedup key. If no window ends, the call answers with the
        job that has this key. Otherwise the call first looks the id up. One of the shards knows the id, because the
        first job exists from the beginning, and the second job took the key."""
        if self._scenario.key_is_free and Rule.IDS_COME_FIRST in self._rules:
            yield from self._begin_lookups(state, job)
        elif self._scenario.key_is_free and job == 0:
            what = f"the former owner knows the dedup key of {_job(job)}"
            yield what, state._replace(wrong=f"I3: {_job(job)} is answered as the job that has its key")

    def _go_on_with_calls(self, state: State) -> Iterator[tuple[str, State]]:
        for at, call in enumerate(state.calls):
            others = state.calls[:at] + state.calls[at + 1 :]
            match call.stage:
                case "asked":
                    yield from self._admit(state, call, others)
                    yield "a router gives up", state._replace(calls=others)
                case "admitted":
                    yield self._commit(state, call, others)
                case "looking":
                    yield from self._look(state, call, others)
                case _:
                    assert_never(call.stage)

    def _admit(self, state: State, call: Call, others: tuple[Call, ...]) -> Iterator[tuple[str, State]]:
        """Admits the call or refuses it. A refused call changes nothing: its router reloads the catalog and begins
        again."""
        shard, name = state.shards[call.place], _NAMES[call.place]
        epoch = call.epoch if Rule.ONE_PLACEMENT_A_CALL in self._rules else state.placement.epoch
        if Rule.ENQUEUES_NEED_AN_OWNED_SLOT in self._rules and shard.state != "owned":
            return
        if Rule.ENQUEUES_COMPARE_EPOCHS in self._rules and epoch < shard.epoch:
            return
        what = "a change of configuration" if call.job is None else f"an enqueue of {_job(call.job)}"
        admitted = call._replace(stage="admitted", epoch=0)
        yield f"{name} admits {what}, by a router that knows epoch {epoch}", _with_call(state, others, admitted)

    def _commit(self, state: State, call: Call, others: tuple[Call, ...]) -> tuple[str, State]:
        """Commits the call. Unique indexes and the second lookup see the present state. The call does not check the
        slot again."""
        shard, name = state.shards[call.place], _NAMES[call.place]
        ended = state._replace(calls=others)
        wrong = "" if shard.state == "owned" else f"I6: {name} writes what is not its own any more"
        if call.job is None:
            paused = _with_shard(ended, call.place, shard._replace(paused=True))
            return f"{name} pauses the queue", paused._replace(told_paused=True, wrong=wrong)
        key, row = self._scenario.keys[call.job], shard.rows[call.job]
        if key in shard.keys or (row != "absent" and not isinstance(row, Leaving)):
            return f"{name} knows {_job(call.job)} already", ended
        if key is not None:
            ended = _with_shard(ended, call.place, shard._replace(keys=shard.keys | {key}))
        stored = _with_row(ended, call.place, call.job, "ready", tally=1)
        return f"{name} stores {_job(call.job)}", _count_stored(stored, call.job)._replace(wrong=wrong)

    def _begin_lookups(self, state: State, job: int) -> Iterator[tuple[str, State]]:
        for version, known in enumerate(state.history, 1):
            places = (*sorted(known.former.difference(known.reads)), *known.reads)
            if Rule.LOOKUPS_FOLLOW_THE_JOB not in self._rules:
                places = places[::-1]
            call = Call("looking", job, places[0], others=places[1:], version=version)
            yield from self._look(state, call, state.calls)

    def _look(self, state: State, call: Call, others: tuple[Call, ...]) -> Iterator[tuple[str, State]]:
        """Looks a job up, as GetJobs, CancelJobs, a call about a lease, or an enqueue with a known dedup key does."""
        assert call.job is not None
        name = _NAMES[call.place]
        if self._has(state.shards[call.place], call.job):
            yield f"{_job(call.job)} is found on {name}", state._replace(calls=others)
            return
        what = f"a lookup by version {call.version} of the catalog does not find {_job(call.job)} on {name}"
        if call.others:
            looking = call._replace(place=call.others[0], others=call.others[1:])
            yield what, _with_call(state, others, looking)
        elif call.version == len(state.history) or Rule.NOT_FOUND_IS_CURRENT not in self._rules:
            yield what, state._replace(calls=others, wrong=f"I1: {_job(call.job)} is said not to exist")
        else:
            yield f"{what}, and begins again", state._replace(calls=others)

    def _grant(self, state: State) -> Iterator[tuple[str, State]]:
        """A router that starts tells the shards what they own, according to its copy of the catalog."""
        for known in state.history:
            shard = state.shards[known.writer]
            at_rest = known.at_rest or Rule.GRANTS_AT_REST not in self._rules
            if at_rest and shard.epoch < known.epoch:
                owned = shard._replace(state="owned", epoch=known.epoch)
                what = f"a router that starts grants the slot to {_NAMES[known.writer]}, epoch {known.epoch}"
                yield what, _with_shard(state, known.writer, owned)

    def _has(self, shard: Shard, job: int) -> bool:
        row = shard.rows[job]
        return row != "absent" and (not isinstance(row, Leaving) or Rule.LEAVING_JOBS_ARE_KNOWN in self._rules)

    def _knows(self, shard: Shard, job: int) -> bool:
        """Returns whether the shard knows the job, by its id or by its dedup key."""
        return self._has(shard, job) or self._scenario.keys[job] in shard.keys

    # ── Consumers and operators ──────────────────────────────────────────────────────────────────────────────────────

    def _consume(self, state: State) -> Iterator[tuple[str, State]]:
        for job in self._jobs:
            for at in _PLACES:
                row = state.shards[at].rows[job]
                what = f"{_job(job)} on {_NAMES[at]}"
                hidden = isinstance(row, Leaving) and Rule.LEAVING_JOBS_ARE_INVISIBLE in self._rules
                if row == "ready" or (isinstance(row, Leaving) and not hidden):
                    leased = _with_held(state, job, state.held[job] | {at})
                    yield f"a consumer claims {what}", _with_row(leased, at, job, "leased")
                if row == "leased":
                    ended = _with_held(state, job, state.held[job] - {at})
                    yield f"the lease on {what} ends by a nack, or by itself", _with_row(ended, at, job, "ready")
                    yield f"{what} is nacked for the last time", _with_row(ended, at, job, "dead")
                    yield f"{what} is acked, or cancelled", _with_row(ended, at, job, "finished")
                if row == "dead":
                    yield f"{what} is redriven", _with_row(state, at, job, "ready")
                if row in ("ready", "dead"):
                    yield f"{what} is cancelled", _with_row(state, at, job, "finished")

    # ── Balancers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _balance(self, state: State) -> Iterator[tuple[str, State]]:
        for step in self._decide(state):
            yield str(step), self._perform(state, step)
            if len(state.frozen) < self._scenario.frozen and step not in state.frozen:
                frozen = state._replace(frozen=tuple(sorted((*state.frozen, step))))
                yield f"another balancer decides to {step.do}, and freezes", frozen
        for at, step in enumerate(state.frozen):
            others = state._replace(frozen=state.frozen[:at] + state.frozen[at + 1 :])
            yield f"a frozen balancer goes on: {step}", self._perform(others, step)

    def _decide(self, state: State) -> Iterator[Step]:
        """Yields the steps that may come next. They depend only on the contents of the databases."""
        known = state.placement
        if known.at_rest:
            if known.epoch <= self._scenario.moves:
                yield Step("begin", known.epoch + 1, known.writer, _PLACES[1 - known.writer])
            return
        source_at, target_at = known.reads
        source, target = state.shards[source_at], state.shards[target_at]
        closed = (source.state, source.epoch) == ("draining", known.epoch)
        opened = (target.state, target.epoch) == ("owned", known.epoch)
        switched = known.writer == target_at
        nothing = Step("close", known.epoch, source_at, target_at)
        if not closed:
            yield nothing
        if not opened and (closed or Rule.OPEN_AFTER_CLOSE not in self._rules):
            yield nothing._replace(do="open", paused=source.paused)
        if not switched and (opened or Rule.SWITCH_AFTER_OPEN not in self._rules):
            yield nothing._replace(do="switch")
        if closed and opened and switched:
            yield from self._decide_on_chunks(source, target, nothing)

    def _decide_on_chunks(self, source: Shard, target: Shard, nothing: Step) -> Iterator[Step]:
        leaving = tuple((job, row.dead) for job, row in enumerate(source.rows) if isinstance(row, Leaving))
        if leaving:
            taken = target.chunk == source.chunk
            if not taken:
                yield nothing._replace(do="take", chunk=source.chunk, jobs=leaving)
            if taken or Rule.COPY_BEFORE_DELETE not in self._rules:
                yield nothing._replace(do="forget", chunk=source.chunk)
        else:
            # A chunk may have any of the jobs, because it is bounded and skips jobs that a consumer has locked.
            ready = [(job, row == "dead") for job, row in enumerate(source.rows) if self._may_leave(row)]
            for size in range(1, len(ready) + 1):
                for jobs in combinations(ready, size):
                    yield nothing._replace(do="depart", chunk=source.chunk + 1, jobs=jobs)
        moved = ("absent", "finished") if Rule.DEAD_JOBS_MOVE in self._rules else ("absent", "finished", "dead")
        if all(row in moved for row in source.rows) or Rule.LEAVE_WHEN_EMPTY not in self._rules:
            yield nothing._replace(do="leave")

    def _perform(self, state: State, step: Step) -> State:
        """Runs one transaction in one database. Changes nothing if the step was done before, or must wait."""
        match step.do:
            case "begin":
                return self._begin(state, step)
            case "close":
                return self._close(state, step)
            case "open":
                return self._open(state, step)
            case "switch":
                return self._switch(state, step)
            case "depart":
                return self._depart(state, step)
            case "take":
                return self._take(state, step)
            case "forget":
                return self._forget(state, step)
            case "leave":
                return self._leave(state, step)
            case _:
                assert_never(step.do)

    def _begin(self, state: State, step: Step) -> State:
        known = state.placement
        if Rule.BEGIN_IS_FENCED in self._rules and (known.epoch, known.at_rest) != (step.epoch - 1, True):
            return state
        reads = (step.source, step.target)
        return _with_placement(state, Placement(step.epoch, step.source, reads, known.former))

    def _close(self, state: State, step: Step) -> State:
        shard = state.shards[step.source]
        if Rule.CLOSE_IS_FENCED in self._rules and shard.epoch >= step.epoch:
            return state
        if Rule.CLOSING_WAITS in self._rules and any(
            (call.stage, call.place) == ("admitted", step.source) for call in state.calls
        ):
            return state
        return _with_shard(state, step.source, shard._replace(state="draining", epoch=step.epoch, chunk=0))

    def _open(self, state: State, step: Step) -> State:
        shard = state.shards[step.target]
        if Rule.OPEN_IS_FENCED in self._rules and shard.epoch >= step.epoch:
            return state
        opened = shard._replace(state="owned", epoch=step.epoch, chunk=0, paused=step.paused)
        return _with_shard(state, step.target, opened)

    def _switch(self, state: State, step: Step) -> State:
        known = state.placement
        if Rule.SWITCH_IS_FENCED in self._rules and (known.epoch, known.writer) != (step.epoch, step.source):
            return state
        reads = (step.source, step.target)
        return _with_placement(state, Placement(step.epoch, step.target, reads, known.former | {step.source}))

    def _depart(self, state: State, step: Step) -> State:
        shard = state.shards[step.source]
        if Rule.DEPARTING_COMPARES_EPOCHS in self._rules and (shard.state, shard.epoch) != ("draining", step.epoch):
            return state
        if Rule.DEPARTING_COMPARES_CHUNKS in self._rules and shard.chunk != step.chunk - 1:
            return state
        # Jobs that were claimed or finished after the decision do not leave.
        there = [(job, dead) for job, dead in step.jobs if self._may_leave(shard.rows[job])]
        there = [(job, dead) for job, dead in there if (shard.rows[job] == "dead") == dead]
        if not there:
            return state
        for job, dead in there:
            state = _with_row(state, step.source, job, Leaving(step.epoch, step.chunk, dead))
        return _with_shard(state, step.source, state.shards[step.source]._replace(chunk=step.chunk))

    def _take(self, state: State, step: Step) -> State:
        shard = state.shards[step.target]
        if Rule.TAKING_COMPARES_EPOCHS in self._rules and (shard.state, shard.epoch) != ("owned", step.epoch):
            return state
        if Rule.TAKING_COMPARES_CHUNKS in self._rules and shard.chunk != step.chunk - 1:
            return state
        if any(shard.rows[job] not in ("absent", "finished") for job, _ in step.jobs):
            # A unique index refuses the chunk.
            return state
        for job, dead in step.jobs:
            if shard.rows[job] == "finished":
                # No index refuses a live job whose id is finished here.
                state = _count_stored(state, job)
            tally = 1 if Rule.BOOKS_MOVE in self._rules else 0
            state = _with_row(state, step.target, job, "dead" if dead else "ready", tally=tally)
        return _with_shard(state, step.target, state.shards[step.target]._replace(chunk=step.chunk))

    def _forget(self, state: State, step: Step) -> State:
        fenced = Rule.FORGETTING_IS_FENCED in self._rules
        for job, row in enumerate(state.shards[step.source].rows):
            if isinstance(row, Leaving) and ((row.epoch, row.chunk) == (step.epoch, step.chunk) or not fenced):
                tally = -1 if Rule.BOOKS_MOVE in self._rules else 0
                state = _with_row(state, step.source, job, "absent", tally=tally)
        return state

    def _leave(self, state: State, step: Step) -> State:
        known = state.placement
        if Rule.LEAVE_IS_FENCED in self._rules and (known.epoch, known.writer) != (step.epoch, step.target):
            return state
        if Rule.CLOSED_STAYS_WRITTEN not in self._rules:
            forgotten = state.shards[step.source]._replace(state="unknown", epoch=0, chunk=0)
            state = _with_shard(state, step.source, forgotten)
        return _with_placement(state, Placement(step.epoch, step.target, (step.target,), known.former))

    def _may_leave(self, row: Row) -> bool:
        match row:
            case "ready":
                return True
            case "leased":
                return Rule.LEASED_JOBS_STAY not in self._rules
            case "dead":
                return Rule.DEAD_JOBS_MOVE in self._rules
            case _:
                return False


def _with_placement(state: State, placement: Placement) -> State:
    # A repeated step changes nothing.
    return state if placement == state.placement else state._replace(history=(*state.history, placement))


def _with_shard(state: State, at: Place, shard: Shard) -> State:
    return state._replace(shards=(shard, state.shards[1]) if at == 0 else (state.shards[0], shard))


def _with_row(state: State, at: Place, job: int, row: Row, *, tally: int = 0) -> State:
    shard = state.shards[at]
    rows = (*shard.rows[:job], row, *shard.rows[job + 1 :])
    return _with_shard(state, at, shard._replace(rows=rows, accepted=shard.accepted + tally))


def _with_call(state: State, others: tuple[Call, ...], call: Call) -> State:
    return state._replace(calls=tuple(sorted((*others, call), key=repr)))


def _with_held(state: State, job: int, held: frozenset[Place]) -> State:
    return state._replace(held=(*state.held[:job], held, *state.held[job + 1 :]))


def _count_stored(state: State, job: int) -> State:
    return state._replace(stored=(*state.stored[:job], state.stored[job] + 1, *state.stored[job + 1 :]))


def _job(job: int) -> str:
    return f"job {job + 1}"


def _jobs(jobs: Iterable[tuple[int, bool]]) -> str:
    return " and ".join(f"{_job(job)}{' (dead)' if dead else ''}" for job, dead in jobs)
