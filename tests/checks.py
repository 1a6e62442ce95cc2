"""Every check that starts no service, and with --then-tests the tests after them.

A failed check stops nothing: all run, each with its time, and the exit code tells whether any failed.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CACHE = Path(sys.prefix, "cache")
# Tests wait more than they compute. Those of a file stay together, and share its clusters; files come as they are
# sorted, where those that take longest are not the last.
SIDE_BY_SIDE = ("-n", str(max(2, os.cpu_count() or 1)), "--dist", "loadfile", "--no-loadscope-reorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    check: Check
    passed: bool
    seconds: float
    output: str


def tool(name: str) -> str:
    return str(BIN / name)


def checks() -> list[Check]:
    found = [
        Check(name="ruff check", command=(tool("ruff"), "check", "--quiet", ".")),
        Check(name="ruff format", command=(tool("ruff"), "format", "--quiet", "--check", "--diff", ".")),
        Check(name="mypy --strict", command=(tool("mypy"),)),
        Check(name="pyright", command=(tool("pyright"), "-p", str(ROOT), "--pythonpath", sys.executable)),
        Check(name="import contracts", command=(tool("lint-imports"), "--no-cache")),
    ]
    if any(ROOT.glob("proto/windrow/v1/*.proto")):
        found += [
            Check(name="buf lint", command=(tool("buf"), "lint")),
            Check(name="generated code", command=(sys.executable, "proto/gen.py", "--check")),
        ]
    if dockerfiles := sorted(map(str, ROOT.glob("deploy/**/Dockerfile*"))):
        found.append(Check(name="hadolint", command=(tool("hadolint"), *dockerfiles)))
    if composes := sorted(map(str, ROOT.glob("deploy/**/compose*.y*ml"))):
        schema = ("--builtin-schema", "vendor.compose-spec")
        found.append(Check(name="compose schema", command=(tool("check-jsonschema"), *schema, *composes)))
    return found


def perform(check: Check) -> Outcome:
    # Tools start one another by name: the installation's own come first. What they remember lives with them.
    environ = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "BUF_CACHE_DIR": str(CACHE / "buf"),
        "MYPY_CACHE_DIR": str(CACHE / "mypy"),
        "RUFF_CACHE_DIR": str(CACHE / "ruff"),
    }
    began = time.monotonic()
    done = subprocess.run(
        check.command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    return Outcome(check=check, passed=done.returncode == 0, seconds=seconds, output=done.stdout.strip())


def run_checks() -> list[str]:
    """Run them all, as many at once as there are cores; return the names of those that failed."""
    failed: list[str] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for outcome in pool.map(perform, checks()):
            verdict = "ok  " if outcome.passed else "FAIL"
            print(f"{verdict} {outcome.check.name:<18}{outcome.seconds:6.1f} s", flush=True)
            if not outcome.passed:
                failed.append(outcome.check.name)
                print(outcome.output, flush=True)
    return failed


def run_tests(arguments: list[str]) -> int:
    """All of them side by side; with arguments one after another, where -x, -s and --pdb mean what they say."""
    how = arguments or SIDE_BY_SIDE
    tests = subprocess.Popen([sys.executable, "-m", "pytest", "-q", "--durations=15", *how], cwd=ROOT)

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        tests.terminate()

    # Ctrl-C reaches pytest by itself; a polite kill of this process must be passed on.
    signal.signal(signal.SIGTERM, pass_on)
    while tests.returncode is None:
        with suppress(KeyboardInterrupt):
            tests.wait()
    # As a shell tells it: 128 and the number of the signal that ended it.
    return tests.returncode if tests.returncode >= 0 else 128 - tests.returncode


def main(arguments: list[str]) -> int:
    failed = run_checks()
    code = run_tests(arguments[1:]) if arguments[:1] == ["--then-tests"] else 0
    if failed:
        print(f"failed checks: {', '.join(failed)}", flush=True)
    return code or bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
