"""How hard the tests try.

By default a test does as many trials as have found mistakes before, so that the whole suite stays fast. With
WINDROW_THOROUGH=1 (`./run test --thorough`) it does many more. WINDROW_SEED varies what is drawn at random; a test that
fails can be run again with the same seed and draws the same.

A run of all tests has only some of those that take turns: WINDROW_TEST_TURN says which.
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
# None: tests that take turns all run.
TURN = os.environ.get("WINDROW_TEST_TURN")


def trials(usual: int, *, thorough: int) -> int:
    """How often a test tries. A test that asks for this has the mark `thorough`."""
    return thorough if THOROUGH else usual


def waiting(tests: Iterable[tuple[str, int | None]], turn: int) -> set[int]:
    """Returns the positions of the tests that have their turn another day. `tests`: the file of each, and the n of its
    mark `turns(n)`. Among such tests of one file, one in n has its turn now."""
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return {place for place, (file, n) in enumerate(tests) if n is not None and (next(numbers[file]) + turn) % n}


def luck_of(name: str) -> random.Random:
    """Random numbers of their own for one test, always the same ones for the same seed."""
    return random.Random(f"{SEED}{name}")
