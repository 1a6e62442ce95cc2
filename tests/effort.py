"""How hard the tests try.

By default a test does as many trials as have found mistakes before, so that the whole suite stays fast. With
WINDROW_THOROUGH=1 (`./run test --thorough`) it does many more. WINDROW_SEED varies what is drawn at random; a test that
fails can be run again with the same seed and draws the same.
"""

from __future__ import annotations

import os
import random

# `./run test --generators`: build a client in each language of docs/clients.md.
GENERATORS = os.environ.get("WINDROW_GENERATORS") == "1"
THOROUGH = os.environ.get("WINDROW_THOROUGH") == "1"
SEED = os.environ.get("WINDROW_SEED", "")


def trials(usual: int, *, thorough: int) -> int:
    """How often a test tries. A test that asks for this has the mark `thorough`."""
    return thorough if THOROUGH else usual


def luck_of(name: str) -> random.Random:
    """Random numbers of their own for one test, always the same ones for the same seed."""
    return random.Random(f"{SEED}{name}")
