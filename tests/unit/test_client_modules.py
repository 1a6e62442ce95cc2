"""The client's package imports each module when the module is first used. Any of the modules can be imported first."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import windrow

MODULES = sorted(path.stem for path in Path(windrow.__file__).parent.glob("*.py") if path.stem != "__init__")
# Before each import, the script removes the package from `sys.modules`. It does not remove the generated messages,
# because these can be registered only once.
SCRIPT = """
import importlib, sys
for module in sys.argv[1:]:
    for known in list(sys.modules):
        if known.startswith("windrow") and not known.startswith("windrow.v1"):
            del sys.modules[known]
    importlib.import_module(f"windrow.{module}")
"""


def test_every_module_can_be_the_first_that_a_program_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *MODULES], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_a_module_is_an_attribute_of_the_package_and_hides_no_name_of_it() -> None:
    package = import_module("windrow")
    assert package.errors is sys.modules["windrow.errors"]
    assert not {*MODULES} & {*package.__all__}
    with pytest.raises(AttributeError, match="module 'windrow' has no attribute 'nothing'"):
        _ = package.nothing
