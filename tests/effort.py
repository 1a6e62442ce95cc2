"""How many examples the tests try, and which tests do not run in every run.

By default, a test does only as many trials as were enough to find earlier mistakes, so that the whole suite stays fast.
With WINDROW_THOROUGH=1 (`./run test --thorough`), a test does many more trials. WINDROW_SEED changes the random values.
A failed test that runs again with the same seed gets the same values.

Some tests take turns: a run of all tests has only some of them, which WINDROW_TEST_TURN chooses. The tests that take
turns are the tests with the mark `turns`, and the tests in the folders of TURNS.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator

# `./run test --generators`: build a client in each language of docs/clients.md.
GENERATORS = os.environ.get("WINDROW_GENERATORS") == "1"
THOROUGH = os.environ.get("WINDROW_THOROUGH") == "1"
SEED = os.environ.get("WINDROW_SEED", "")
# Tests in these folders start whole programs. They take a third of the time of all tests. For a folder with the number
# n, one in n of its tests runs in each turn, unless a mark gives the test another number.
TURNS = {"e2e": 3, "fault": 3}
# None: all tests that take turns run.
TURN = os.environ.get("WINDROW_TEST_TURN")


def trials(usual: int, *, thorough: int) -> int:
    """Returns the number of trials of a test. A test that asks for this has the mark `thorough`."""
    return thorough if THOROUGH else usual


def waiting(tests: Iterable[int | None], turn: int) -> set[int]:
    """Returns the positions of the tests that do not run in this turn. `tests` has an entry for each test: None if the
    test always runs, or a number n. Of the tests with the number n, one in n runs in each turn. Neighbouring tests have
    different turns, so the tests of a file are spread over the turns."""
    numbers: dict[int, Iterator[int]] = defaultdict(itertools.count)
    return {place for place, n in enumerate(tests) if n is not None and (next(numbers[n]) + turn) % n}


def luck_of(name: str) -> random.Random:
    """Returns a generator of random numbers for one test. The same seed and name always give the same numbers."""
    return random.Random(f"{SEED}{name}")
