"""How an org gets a slot of its own, as a model small enough to visit every reachable state.

docs/decisions/0017-moving-slots.md describes what each step writes. tests/models/move.py models how one slot moves.
This model has two slots, the org's hash slot and its own slot, which move independently. `Rule` names the rules that
keep pinning safe. If any one rule is left out, the search must find a violation (tests/property/test_pin_model.py).

The model has one org with one job and one queue, two shards and the catalog. An operator pins the org at any time.
Routers with any past or present catalog repeat the job. Routers also create the org's row, in its hash slot, and the
queue. A balancer may stop at any place, and other balancers freeze between a decision and its step. Routers start, and
grant slots to shards.

Chunks, leases, dead jobs, dedup keys and lookups are only in tests/models/move.py. In this model, jobs leave one shard
and arrive on the other in one step. A shard is closed only when no enqueue is running on it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType, assert_never

from tests.models.exploration import Explored, visit


class Rule(enum.Enum):
    """The rules that keep pinning safe."""

    PINNED_AT_REST = "an org is pinned while its hash slot is at rest"
    FORMER_OWNERS_ARE_INHERITED = "whoever owned the hash slot before counts as one who owned the org's"
    ADOPTED_BEFORE_CLOSE = (
        "a shard knows the pinned orgs that live there before it closes their slots, or their hashes'"
    )
    ADOPTED_WHERE_IT_LIVES = "only the shard that takes an org's jobs is told of its slot"
    SETTLING_COMPARES_EPOCHS = "who tells a shard of an org's slot compares the shard's epoch"
    NEW_QUEUES_ARE_WAITED_FOR = "an org is put into another slot while none of its queues is being made"
    UNKNOWN_ORGS_ARE_ADOPTED = "an org that its shard has never heard of is made known there"
    QUEUES_FOLLOW_THEIR_ORG = "a new queue has the slot of its org's row, not that of the hash"
    SLOTS_ONLY_RISE = "an org that has its own slot on a shard is never put back into its hash's"
    CONFIGURATION_IS_THE_SLOTS = "who opens a slot configures the queues of that slot"


EVERY_RULE = frozenset(Rule)

Place = NewType("Place", int)
_PLACES = (Place(0), Place(1))
_NAMES = ("A", "B")

# The org's hash slot, or its own slot.
Slot = NewType("Slot", int)
_HASH, _OWN = _SLOTS = (Slot(0), Slot(1))
_CALLED = ("the hash slot", "the org's slot")


class Known(NamedTuple):
    """A row of windrow.owned_slot."""

    state: Literal["unknown", "owned", "draining"]
    epoch: int


class Shard(NamedTuple):
    """One database: what it knows about the org."""

    # What the shard knows about each slot.
    known: tuple[Known, Known]
    # The slots in which the shard has the org and the queue; None: the shard does not have it.
    org: Slot | None
    queue: Slot | None
    job: Literal["absent", "ready", "finished"]
    # Stands for the configuration of the queue.
    paused: bool


class Placement(NamedTuple):
    epoch: int
    writer: Place
    # The shards in the order in which jobs travel.
    reads: tuple[Place, ...]
    former: frozenset[Place]

    @property
    def at_rest(self) -> bool:
        return len(self.reads) == 1


class Catalog(NamedTuple):
    """One version of the catalog."""

    epoch: int
    # The placement of each slot. After the org is pinned, this includes the org's own slot.
    placements: tuple[Placement, ...]
    # The epoch at which the org was pinned; 0: the org was not pinned.
    pinned: int = 0

    @property
    def slot(self) -> Slot:
        return _OWN if self.pinned else _HASH

    @property
    def home(self) -> Placement:
        return self.placements[self.slot]


class Call(NamedTuple):
    """A call that waits. Other processes can run before the call continues."""

    # "asked": the former owners do not know the job. "making": the queue is being created. "admitted": a snapshot found
    # the call's slot owned, and the call will commit.
    stage: Literal["asked", "making", "admitted"]
    # True: the call pauses the queue. False: it enqueues the job.
    pauses: bool
    place: Place
    epoch: int
    # The slot of a queue that is being created.
    slot: Slot = _HASH


class Step(NamedTuple):
    """The step that a balancer has decided to do next, with the data that it read for this decision."""

    do: Literal["begin", "adopt", "close", "open", "switch", "carry", "leave"]
    slot: Slot
    # The epoch of the move. For "begin": the epoch with which the move was planned. For "adopt": the epoch of the pin.
    epoch: int
    source: Place
    target: Place
    # Only for "open": whether the source has the org in this slot, whether it has the queue, and how the queue is
    # configured there.
    has_org: bool = False
    has_queue: bool = False
    paused: bool = False

    def __str__(self) -> str:
        source, target, slot = _NAMES[self.source], _NAMES[self.target], _CALLED[self.slot]
        match self.do:
            case "begin":
                return f"begin: the catalog says that {slot} goes from {source} to {target}"
            case "adopt":
                return f"adopt: {source} has the org in its own slot, epoch {self.epoch}"
            case "close":
                return f"close: {source} takes no more jobs of {slot}, epoch {self.epoch}"
            case "open":
                return f"open: {target} takes jobs of {slot}, epoch {self.epoch}"
            case "switch":
                return f"switch: the catalog says that {target} writes {slot}, epoch {self.epoch}"
            case "carry":
                return f"carry: what {source} has of {slot} goes to {target}, epoch {self.epoch}"
            case "leave":
                return f"leave: the catalog says that {target} alone is read for {slot}, epoch {self.epoch}"
            case _:
                assert_never(self.do)


class State(NamedTuple):
    # All versions so far. The last one is the present catalog.
    history: tuple[Catalog, ...]
    shards: tuple[Shard, Shard]
    # The calls are sorted, because all routers are alike, and so the order of the calls does not matter.
    calls: tuple[Call, ...]
    frozen: tuple[Step, ...]
    # How often the job was stored as a live job.
    stored: int
    told_paused: bool
    # A violation that has happened; empty if none has.
    wrong: str

    @property
    def catalog(self) -> Catalog:
        return self.history[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The processes and slots of an exploration. Each scenario is small, so that all are explored within seconds."""

    name: str
    # Whether the hash slot has come from shard B. If so, the org had a queue and the finished job on B.
    lived_on_b: bool = False
    # How often each slot moves.
    moves: tuple[int, int] = (1, 1)
    # How many calls may wait at the same time, and how many balancers may be frozen besides the active one.
    calls: int = 1
    frozen: int = 1
    enqueues: bool = True
    configures: bool = False


SCENARIOS = (
    Scenario(name="an org is pinned while it is enqueued to"),
    Scenario(name="an org is pinned where it did not live before", lived_on_b=True, moves=(2, 1)),
    Scenario(name="the hash slot of a pinned org comes and goes", moves=(2, 1), frozen=0),
    Scenario(name="a queue of a pinned org is paused", lived_on_b=True, moves=(2, 0), enqueues=False, configures=True),
)


def explore(scenario: Scenario, rules: frozenset[Rule] = EVERY_RULE) -> Explored:
    """Visits every state that can be reached under these rules."""
    return visit(scenario.name, _Model(scenario, rules))


class _Model:
    def __init__(self, scenario: Scenario, rules: frozenset[Rule]) -> None:
        self._scenario = scenario
        self._rules = rules

    def start(self) -> State:
        """Returns the first state. The hash slot is at rest on A."""
        moved = self._scenario.lived_on_b
        epoch = 2 if moved else 1
        nothing = Known("unknown", 0)
        a = Shard((Known("owned", epoch), nothing), None, None, "absent", paused=False)
        b = Shard((nothing, nothing), None, None, "absent", paused=False)
        if moved:
            # The open step created the org and its queue on A.
            a = a._replace(org=_HASH, queue=_HASH)
            b = Shard((Known("draining", 2), nothing), _HASH, _HASH, "finished", paused=False)
        former = frozenset(_PLACES[1:]) if moved else frozenset[Place]()
        return State(
            history=(Catalog(epoch, (Placement(epoch, _PLACES[0], _PLACES[:1], former),)),),
            shards=(a, b),
            calls=(),
            frozen=(),
            stored=int(moved),
            told_paused=False,
            wrong="",
        )

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        if len(state.calls) < self._scenario.calls:
            yield from self._begin_calls(state)
        yield from self._go_on_with_calls(state)
        for at in _PLACES:
            if state.shards[at].job == "ready":
                finished = state.shards[at]._replace(job="finished")
                yield f"the job is claimed on {_NAMES[at]}, and acked", _with_shard(state, at, finished)
        yield from self._pin(state)
        yield from self._grant(state)
        yield from self._balance(state)

    # ── What must hold ───────────────────────────────────────────────────────────────────────────────────────────────

    def broken(self, state: State) -> str | None:
        if state.wrong:
            return state.wrong
        for slot in _SLOTS:
            if all(shard.known[slot].state == "owned" for shard in state.shards):
                return f"I6: both shards take jobs of {_CALLED[slot]}"
        if state.stored > 1:
            return "I3: the job was stored twice"
        jobs = [shard.job for shard in state.shards]
        if state.stored and jobs == ["absent", "absent"]:
            return "I1: the job is nowhere"
        home = state.catalog.home
        if any(jobs[at] == "ready" for at in _PLACES if at not in home.reads):
            return "I1: the job is where nobody reads"
        if home.at_rest:
            name, shard = _NAMES[home.writer], state.shards[home.writer]
            known = shard.known[_slot_there(shard)]
            if known.state != "owned" or known.epoch > home.epoch:
                return f"I1: {name} takes no jobs of the org that lives there"
            if shard.paused != state.told_paused:
                return f"I6: {name} has another configuration than the operator was told"
        return None

    def is_over(self, state: State) -> bool:
        at_rest = all(placement.at_rest for placement in state.catalog.placements)
        return at_rest and not state.calls and all(shard.job != "ready" for shard in state.shards)

    # ── Routers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_calls(self, state: State) -> Iterator[tuple[str, State]]:
        """Calls begin with any past or present catalog, because a router's copy may be that old."""
        for home in {(known.home.epoch, known.home.writer): known.home for known in state.history}.values():
            if self._scenario.enqueues:
                others = home.former - {home.writer}
                call = Call("asked", False, home.writer, home.epoch)
                if not others:
                    yield from self._come(state, call, state.calls)
                elif all(state.shards[at].job == "absent" for at in others):
                    what = f"a router that knows epoch {home.epoch} asks the former owner, which does not know the job"
                    yield what, _with_call(state, state.calls, call)
            if self._scenario.configures and not state.told_paused:
                yield from self._come(state, Call("asked", True, home.writer, home.epoch), state.calls)

    def _go_on_with_calls(self, state: State) -> Iterator[tuple[str, State]]:
        for at, call in enumerate(state.calls):
            others = state.calls[:at] + state.calls[at + 1 :]
            name, shard = _NAMES[call.place], state.shards[call.place]
            match call.stage:
                case "asked":
                    yield from self._come(state, call, others)
                    yield "a router gives up", state._replace(calls=others)
                case "making":
                    made = shard if shard.queue is not None else shard._replace(queue=call.slot)
                    ended = state._replace(calls=others)
                    yield f"the queue is made on {name}, in {_CALLED[call.slot]}", _with_shard(ended, call.place, made)
                case "admitted":
                    yield self._commit(state, call, others)
                case _:
                    assert_never(call.stage)

    def _come(self, state: State, call: Call, others: tuple[Call, ...]) -> Iterator[tuple[str, State]]:
        """Called when a call reaches its shard. If the org is missing, creates the org in its hash slot. If the queue
        is missing, creates the queue, too. A call that the shard refuses changes nothing."""
        name, shard = _NAMES[call.place], state.shards[call.place]
        if shard.queue is None:
            org = _HASH if shard.org is None else shard.org
            slot = org if Rule.QUEUES_FOLLOW_THEIR_ORG in self._rules else _HASH
            named = _with_shard(state, call.place, shard._replace(org=org))
            # The call itself begins again when the queue exists.
            making = Call("making", False, call.place, 0, slot)
            yield (
                f"a router that knows epoch {call.epoch} has a queue made on {name}",
                _with_call(named, others, making),
            )
            return
        known = shard.known[shard.queue]
        if known.state == "owned" and known.epoch <= call.epoch:
            what = f"{name} admits a router that knows epoch {call.epoch}, as of {_CALLED[shard.queue]}"
            yield what, _with_call(state, others, call._replace(stage="admitted", epoch=0))

    def _commit(self, state: State, call: Call, others: tuple[Call, ...]) -> tuple[str, State]:
        name, shard = _NAMES[call.place], state.shards[call.place]
        ended = state._replace(calls=others)
        if call.pauses:
            paused = _with_shard(ended, call.place, shard._replace(paused=True))
            return f"{name} pauses the queue", paused._replace(told_paused=True)
        if shard.job != "absent":
            return f"{name} knows the job already", ended
        stored = _with_shard(ended, call.place, shard._replace(job="ready"))
        return f"{name} stores the job", stored._replace(stored=state.stored + 1)

    def _grant(self, state: State) -> Iterator[tuple[str, State]]:
        """A router that starts tells the shards what they own, according to its copy of the catalog."""
        for version in state.history:
            for slot, known in zip(_SLOTS, version.placements, strict=False):
                if known.at_rest and state.shards[known.writer].known[slot].epoch < known.epoch:
                    what = f"a router that starts grants {_CALLED[slot]} to {_NAMES[known.writer]}"
                    yield what, _with_known(state, known.writer, slot, Known("owned", known.epoch))

    # ── Operators and balancers ──────────────────────────────────────────────────────────────────────────────────────

    def _pin(self, state: State) -> Iterator[tuple[str, State]]:
        known = state.catalog
        hashed = known.placements[_HASH]
        if known.pinned or not (hashed.at_rest or Rule.PINNED_AT_REST not in self._rules):
            return
        epoch = known.epoch + 1
        former = hashed.former if Rule.FORMER_OWNERS_ARE_INHERITED in self._rules else frozenset[Place]()
        own = Placement(epoch, hashed.writer, (hashed.writer,), former)
        after = Catalog(epoch, (hashed, own), epoch)
        yield f"the org is pinned on {_NAMES[hashed.writer]}, epoch {epoch}", _with_catalog(state, after)

    def _balance(self, state: State) -> Iterator[tuple[str, State]]:
        for slot in _SLOTS[: len(state.catalog.placements)]:
            for step in self._decide(state, slot):
                yield str(step), self._perform(state, step)
                if len(state.frozen) < self._scenario.frozen and step not in state.frozen:
                    frozen = state._replace(frozen=tuple(sorted((*state.frozen, step))))
                    yield f"another balancer decides to {step.do} {_CALLED[step.slot]}, and freezes", frozen
        for at, step in enumerate(state.frozen):
            others = state._replace(frozen=state.frozen[:at] + state.frozen[at + 1 :])
            yield f"a frozen balancer goes on: {step}", self._perform(others, step)

    def _decide(self, state: State, slot: Slot) -> Iterator[Step]:
        """Yields the step that comes next for a slot. It depends only on the contents of the databases."""
        known = state.catalog.placements[slot]
        if known.at_rest:
            if self._moved(state, slot) < self._scenario.moves[slot]:
                yield Step("begin", slot, known.epoch, known.writer, _PLACES[1 - known.writer])
            return
        source_at, target_at = known.reads
        source, target = state.shards[source_at], state.shards[target_at]
        nothing = Step("close", slot, known.epoch, source_at, target_at)
        if source.known[slot].epoch < known.epoch:
            if self._is_adopted(state, nothing.source):
                yield nothing
            else:
                yield nothing._replace(do="adopt", slot=_OWN, epoch=state.catalog.pinned)
        elif target.known[slot].epoch < known.epoch:
            yield nothing._replace(
                do="open", has_org=source.org == slot, has_queue=source.queue is not None, paused=source.paused
            )
        elif known.writer != nothing.target:
            yield nothing._replace(do="switch")
        elif source.job == "ready" and source.org == slot:
            yield nothing._replace(do="carry")
        else:
            yield nothing._replace(do="leave")

    def _moved(self, state: State, slot: Slot) -> int:
        """Returns how often the slot has begun to move."""
        epochs = {version.placements[slot].epoch for version in state.history if len(version.placements) > slot}
        return len(epochs) - 1

    def _is_adopted(self, state: State, at: Place) -> bool:
        known, shard = state.catalog, state.shards[at]
        if not known.pinned or shard.org == _OWN or Rule.ADOPTED_BEFORE_CLOSE not in self._rules:
            return True
        if shard.org is None and Rule.UNKNOWN_ORGS_ARE_ADOPTED not in self._rules:
            return True
        return known.home.writer != at and Rule.ADOPTED_WHERE_IT_LIVES in self._rules

    def _perform(self, state: State, step: Step) -> State:
        """Runs one transaction in one database. Changes nothing if the step was done before, or must wait."""
        match step.do:
            case "begin":
                return self._begin(state, step)
            case "adopt":
                return self._adopt(state, step)
            case "close":
                return self._close(state, step)
            case "open":
                return self._open(state, step)
            case "switch":
                return self._switch(state, step)
            case "carry":
                return self._carry(state, step)
            case "leave":
                return self._leave(state, step)
            case _:
                assert_never(step.do)

    def _begin(self, state: State, step: Step) -> State:
        known = state.catalog.placements[step.slot]
        if (known.epoch, known.at_rest) != (step.epoch, True):
            return state
        epoch = state.catalog.epoch + 1
        moving = Placement(epoch, step.source, (step.source, step.target), known.former)
        return _with_placement(state, step.slot, moving, epoch)

    def _adopt(self, state: State, step: Step) -> State:
        shard = state.shards[step.source]
        if self._must_wait(state, step.source):
            return state
        if shard.known[_OWN].epoch < step.epoch or Rule.SETTLING_COMPARES_EPOCHS not in self._rules:
            state = _with_known(state, step.source, _OWN, Known("owned", step.epoch))
        queue = None if shard.queue is None else _OWN
        return _with_shard(state, step.source, state.shards[step.source]._replace(org=_OWN, queue=queue))

    def _must_wait(self, state: State, at: Place) -> bool:
        """Returns whether the step must wait for queues of the org that are being created."""
        making = any((call.stage, call.place) == ("making", at) for call in state.calls)
        return making and Rule.NEW_QUEUES_ARE_WAITED_FOR in self._rules

    def _close(self, state: State, step: Step) -> State:
        admitted = any((call.stage, call.place) == ("admitted", step.source) for call in state.calls)
        if admitted or state.shards[step.source].known[step.slot].epoch >= step.epoch:
            return state
        return _with_known(state, step.source, step.slot, Known("draining", step.epoch))

    def _open(self, state: State, step: Step) -> State:
        shard = state.shards[step.target]
        if shard.known[step.slot].epoch >= step.epoch:
            return state
        if step.has_org:
            org = shard.org
            if org is None or org < step.slot or Rule.SLOTS_ONLY_RISE not in self._rules:
                org = step.slot
            if org != shard.org and self._must_wait(state, step.target):
                return state
            has_queue = step.has_queue or shard.queue is not None
            shard = shard._replace(org=org, queue=org if has_queue else None)
            if step.has_queue and (org == step.slot or Rule.CONFIGURATION_IS_THE_SLOTS not in self._rules):
                shard = shard._replace(paused=step.paused)
        return _with_known(_with_shard(state, step.target, shard), step.target, step.slot, Known("owned", step.epoch))

    def _switch(self, state: State, step: Step) -> State:
        known = state.catalog.placements[step.slot]
        if (known.epoch, known.writer) != (step.epoch, step.source):
            return state
        switched = known._replace(writer=step.target, former=known.former | {step.source})
        return _with_placement(state, step.slot, switched, state.catalog.epoch)

    def _carry(self, state: State, step: Step) -> State:
        source, target = state.shards[step.source], state.shards[step.target]
        fenced = (Known("draining", step.epoch), Known("owned", step.epoch))
        if (source.known[step.slot], target.known[step.slot]) != fenced:
            return state
        if source.job != "ready" or source.org != step.slot:
            return state
        if target.job != "absent":
            return state._replace(wrong="I3: the job is on the target too")
        state = _with_shard(state, step.source, source._replace(job="absent"))
        return _with_shard(state, step.target, target._replace(job="ready"))

    def _leave(self, state: State, step: Step) -> State:
        known = state.catalog.placements[step.slot]
        if (known.epoch, known.writer) != (step.epoch, step.target):
            return state
        return _with_placement(state, step.slot, known._replace(reads=(step.target,)), state.catalog.epoch)


def _slot_there(shard: Shard) -> Slot:
    """Returns the slot by which a router's next call is checked."""
    if shard.queue is not None:
        return shard.queue
    return _HASH if shard.org is None else shard.org


def _with_catalog(state: State, catalog: Catalog) -> State:
    return state if catalog == state.catalog else state._replace(history=(*state.history, catalog))


def _with_placement(state: State, slot: Slot, placement: Placement, epoch: int) -> State:
    placements = list(state.catalog.placements)
    placements[slot] = placement
    return _with_catalog(state, state.catalog._replace(epoch=epoch, placements=tuple(placements)))


def _with_shard(state: State, at: Place, shard: Shard) -> State:
    return state._replace(shards=(shard, state.shards[1]) if at == 0 else (state.shards[0], shard))


def _with_known(state: State, at: Place, slot: Slot, known: Known) -> State:
    shard = state.shards[at]
    return _with_shard(
        state, at, shard._replace(known=(known, shard.known[1]) if slot == 0 else (shard.known[0], known))
    )


def _with_call(state: State, others: tuple[Call, ...], call: Call) -> State:
    return state._replace(calls=tuple(sorted((*others, call))))
