"""How hard the tests try.

By default a test does as many trials as have found mistakes before, so that the whole suite stays fast. With
WINDROW_THOROUGH=1 (`./run test --thorough`) it does many more. WINDROW_SEED varies what is drawn at random; a failed
test that runs again with the same seed draws the same values.

Some tests take turns: a run of all tests has only a part of them, which WINDROW_TEST_TURN chooses.
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
# None: all tests that take turns run.
TURN = os.environ.get("WINDROW_TEST_TURN")


def trials(usual: int, *, thorough: int) -> int:
    """Returns the number of trials of a test. A test that asks for this has the mark `thorough`."""
    return thorough if THOROUGH else usual


def waiting(tests: Iterable[tuple[str, int | None]], turn: int) -> set[int]:
    """Returns the positions of the tests whose turn is on another day. `tests`: for each test its file, and the n of
    its mark `turns(n)`, if it has the mark. In each file, one in n of the marked tests has its turn now."""
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return {place for place, (file, n) in enumerate(tests) if n is not None and (next(numbers[file]) + turn) % n}


def luck_of(name: str) -> random.Random:
    """Returns a generator of random numbers for one test. It draws the same numbers for the same seed and name."""
    return random.Random(f"{SEED}{name}")
