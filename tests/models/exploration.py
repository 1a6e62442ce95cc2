"""Explores all interleavings of a model, breadth first. So the counter-example that is found first is one of the
shortest."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Model(Protocol[S]):
    """A protocol: its states, and the transitions between states."""

    def start(self) -> S: ...

    def steps(self, state: S) -> Iterator[tuple[str, S]]:
        """Returns every event that can happen next. An event has a description in words, and the state to which it
        leads."""
        ...

    def broken(self, state: S) -> str | None:
        """Returns the invariant that this state violates, if any."""
        ...

    def is_over(self, state: S) -> bool:
        """Returns whether nothing is left to do."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    name: str
    states: int
    # The fault of the state at the end of the trace. None: every state is right.
    broken: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.name}: {self.states:,} states, and nothing wrong in any"
        steps = [f"{number:4}. {step}" for number, step in enumerate(self.trace, 1)]
        return "\n".join([f"{self.name}:", *steps, f"   => {self.broken}"])


def visit(name: str, model: Model[S]) -> Explored:
    """Visits every reachable state. Stops at the first state that violates an invariant. If no state violates one,
    looks for a state from which the end can never be reached."""
    # The number of a state is its place in this list. States are large, so they are named by numbers. Each state is
    # hashed only once for each step that leads to it.
    states = [model.start()]
    numbers = {states[0]: 0}
    # How each state was reached for the first time, and all states that lead to each state.
    origins: list[tuple[int, str] | None] = [None]
    before: list[list[int]] = [[]]

    def found(broken: str, at: int) -> Explored:
        steps: list[str] = []
        while (origin := origins[at]) is not None:
            at, what = origin
            steps.append(what)
        return Explored(name=name, states=len(states), broken=broken, trace=tuple(reversed(steps)))

    # The list grows during this loop.
    for at, state in enumerate(states):
        for what, after in model.steps(state):
            number = numbers.setdefault(after, len(states))
            if number == len(states):
                states.append(after)
                origins.append((at, what))
                before.append([])
                broken = model.broken(after)
                if broken is not None:
                    return found(broken, number)
            before[number].append(at)

    can_end = [model.is_over(state) for state in states]
    waiting = deque(at for at, ends in enumerate(can_end) if ends)
    while waiting:
        for at in before[waiting.popleft()]:
            if not can_end[at]:
                can_end[at] = True
                waiting.append(at)
    if not all(can_end):
        return found("I1: from here the move, or a job, can never be finished", can_end.index(False))
    return Explored(name=name, states=len(states))
