"""Which test files a change can touch, nearest first.

A module touches the modules that import it, directly or indirectly. It also touches the modules that start it as a
program: they have its name after "-m" in a command. A test file also depends on a conftest.py if the test file names
one of its fixtures. A file that is not Python touches the modules that name the file or a folder that contains it.
Modules name an SQL statement by its constant, and a page by its path. The distance is the number of such steps.

Almost every change touches the tests in tests/e2e and tests/fault: these tests run whole programs, and take long. They
are chosen only if the changed file is in tests/, proof/, chaos/ or bench/, and touches them through modules of these
four folders.
"""

import ast
import itertools
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

import grimp

from tests.checks import CACHE, ROOT
from tests.durations import seconds_of_files

PACKAGES = (
    *("router", "shard", "archiver", "balancer", "embedded", "cli", "windrow"),
    *("proof", "bench", "chaos", "examples", "tests"),
)
CLIENT = "clients/python/"
# Tests that drive whole programs.
FAR = ("tests/e2e/", "tests/fault/")
# The folders that start whole programs, and the code that checks them.
PROVING = ("tests", "proof", "chaos", "bench")
# The assumed time of a test file whose time is not known, because the file has never run in this checkout.
SECONDS_UNKNOWN = 4.0
# The seconds for the tests that are chosen. With the start of the workers, a run takes two minutes.
BUDGET_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    changed: list[str]
    files: list[str]
    # How many more test files the change touches. There is no time to run these files.
    left_out: int

    def __str__(self) -> str:
        what = f"{len(self.changed)} changed file(s) touch {len(self.files) + self.left_out} test file(s)"
        if not self.files:
            return f"{what}: nothing to run"
        rest = f"; {self.left_out} further away are left to ./run test" if self.left_out else ""
        return f"{what}: running the nearest {len(self.files)}, {', '.join(self.files[:4])} …{rest}"


def choose(*, workers: int) -> Choice:
    """Returns the tests to run for the changes since the merge base with the main branch, committed or not."""
    files = changed_files()
    distances = Repository().touched(files)
    chosen = within(distances, seconds_of_files(), budget_s=BUDGET_S * workers)
    return Choice(changed=files, files=chosen, left_out=len(distances) - len(chosen))


def changed_files() -> list[str]:
    main = next(name for name in ("origin/main", "main", "HEAD") if _git("rev-parse", "--verify", "-q", name))
    (base,) = _git("merge-base", main, "HEAD")
    return sorted({*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")})


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1]


def within(distances: Mapping[str, int], seconds: Mapping[str, float], *, budget_s: float) -> list[str]:
    """Chooses the nearest files first. A file is chosen only if its time still fits into the budget, or if the file
    itself has changed."""
    chosen: list[str] = []
    for file in sorted(distances, key=lambda file: (distances[file], seconds.get(file, SECONDS_UNKNOWN), file)):
        takes_s = seconds.get(file, SECONDS_UNKNOWN)
        if distances[file] == 0 or takes_s <= budget_s:
            budget_s -= takes_s
            chosen.append(file)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A Python file, with the names and texts in it that show on which other files it depends."""

    path: str
    strings: frozenset[str]
    # Names of variables, attributes and arguments.
    names: frozenset[str]
    fixtures: frozenset[str]
    # Modules that are started as programs.
    programs: frozenset[str]


class Repository:
    """The Python files of the checkout, and on which other files each of them depends."""

    @cached_property
    def sources(self) -> dict[str, Source]:
        """Returns the files by the names of their modules."""
        files = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
        return {module_of(file): source_of(file) for file in files if (ROOT / file).is_file()}

    @cached_property
    def dependents(self) -> Mapping[str, set[str]]:
        """For each module, the modules that depend on it directly."""
        graph = grimp.build_graph(*PACKAGES, cache_dir=str(CACHE / "imports"))
        steps: dict[str, set[str]] = defaultdict(set)
        for module in graph.modules:
            steps[module] |= graph.find_modules_that_directly_import(module)
        for module, source in self.sources.items():
            for program in source.programs:
                steps[program].add(module)
                steps[f"{program}.__main__"].add(module)
        for conftest in [module for module in self.sources if module.endswith(".conftest")]:
            for module, source in self.sources.items():
                beside = module.startswith(conftest.removesuffix("conftest"))
                if beside and module != conftest and source.names & self.sources[conftest].fixtures:
                    steps[conftest].add(module)
        return steps

    def modules_of(self, file: str) -> set[str]:
        """Returns the modules that count as changed if this file has changed."""
        path = PurePosixPath(file)
        if path.suffix == ".py":
            return {module_of(file)}
        if path.suffix == ".sql":
            room = ".".join(path.parts[:-2])
            beside = {module for module in self.sources if module.rpartition(".")[0] == room}
            using = {module for module in beside if path.stem.upper() in self.sources[module].names}
            return using - {f"{room}.statements"} or beside
        generated: set[str] = set()
        if path.suffix == ".proto":
            generated = {f"windrow.v1.{path.stem}_pb2", f"windrow.v1.{path.stem}_pb2_grpc"}
        named = {file, path.name, *map(str, path.parents)} - {"."}
        return generated | {module for module, source in self.sources.items() if source.strings & named}

    def touched(self, files: Iterable[str]) -> dict[str, int]:
        """Returns the test files that a change of these files can touch, each with its distance."""
        changed = set[str]().union(*map(self.modules_of, files))
        everything = self._distances(changed, set(self.sources))
        proving = {module for module in self.sources if module.partition(".")[0] in PROVING}
        near = self._distances(changed & proving, proving)
        return {
            path: distance
            for module, distance in everything.items()
            if (path := self.sources[module].path).startswith("tests/")
            and PurePosixPath(path).name.startswith("test_")
            and (not path.startswith(FAR) or module in near)
        }

    def _distances(self, changed: Collection[str], among: Collection[str]) -> dict[str, int]:
        distances: dict[str, int] = {}
        at, distance = set(changed) & set(among), 0
        while at:
            distances.update(dict.fromkeys(at, distance))
            at = {after for module in at for after in self.dependents.get(module, ())} & set(among) - set(distances)
            distance += 1
        return distances


def module_of(file: str) -> str:
    path = PurePosixPath(file.removeprefix(CLIENT)).with_suffix("")
    parts = path.parts[:-1] if path.name == "__init__" else path.parts
    return ".".join(parts)


def source_of(file: str) -> Source:
    strings: set[str] = set()
    names: set[str] = set()
    fixtures: set[str] = set()
    programs: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        match node:
            case ast.Constant(value=str(text)):
                strings.add(text.rstrip("/"))
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                texts = [element.value if isinstance(element, ast.Constant) else None for element in elements]
                programs.update(str(program) for flag, program in itertools.pairwise(texts) if flag == "-m" and program)
            case ast.FunctionDef(decorator_list=decorators) | ast.AsyncFunctionDef(decorator_list=decorators):
                if any("fixture" in ast.unparse(decorator) for decorator in decorators):
                    fixtures.add(node.name)
            case _:
                pass
    return Source(
        path=file,
        strings=frozenset(strings),
        names=frozenset(names),
        fixtures=frozenset(fixtures),
        programs=frozenset(programs),
    )
