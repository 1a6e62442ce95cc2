"""Imports between files. The directions between packages are contracts of import-linter (pyproject.toml)."""

from __future__ import annotations

import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports that only type checkers execute count, too. If this test fails, the error names the circle of imports."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = [package for package in settings["root_packages"] if package != "tests"]
    graph = grimp.build_graph(*packages, cache_dir=None)
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()
