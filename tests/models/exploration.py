"""Explores all interleavings of a model, breadth first, so that the first counter-example is one of the shortest."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Model(Protocol[S]):
    """A protocol: its states, and the transitions between them."""

    def start(self) -> S: ...

    def steps(self, state: S) -> Iterator[tuple[str, S]]:
        """Returns every possible next event, described in words, with the state that it leads to."""
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
    # What is wrong with the state at the end of the trace; None: no state is wrong.
    broken: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.name}: {self.states:,} states, and nothing wrong in any"
        steps = [f"{number:4}. {step}" for number, step in enumerate(self.trace, 1)]
        return "\n".join([f"{self.name}:", *steps, f"   => {self.broken}"])


def visit(name: str, model: Model[S]) -> Explored:
    """Visits every reachable state. Stops at the first that violates an invariant; if none does, looks for one from
    which the end can never be reached."""
    start = model.start()
    # How each state was first reached, and all states that lead to it.
    origins: dict[S, tuple[S, str] | None] = {start: None}
    before: dict[S, list[S]] = {start: []}

    def found(broken: str, at: S) -> Explored:
        steps: list[str] = []
        origin = origins[at]
        while origin is not None:
            steps.append(origin[1])
            origin = origins[origin[0]]
        return Explored(name=name, states=len(origins), broken=broken, trace=tuple(reversed(steps)))

    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        for what, after in model.steps(state):
            if after not in origins:
                origins[after] = (state, what)
                before[after] = []
                broken = model.broken(after)
                if broken is not None:
                    return found(broken, after)
                waiting.append(after)
            before[after].append(state)

    can_end = {state for state in origins if model.is_over(state)}
    waiting.extend(can_end)
    while waiting:
        news = [state for state in before[waiting.popleft()] if state not in can_end]
        can_end.update(news)
        waiting.extend(news)
    for state in origins:
        if state not in can_end:
            return found("I1: from here the move, or a job, can never be finished", state)
    return Explored(name=name, states=len(origins))
