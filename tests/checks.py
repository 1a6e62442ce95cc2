"""Every check that starts no service: lint, formatting, types, imports, protos, deploy files.

A failed check does not stop the other checks. Each check is printed with its time. The exit code tells whether a check
failed.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CACHE = Path(sys.prefix, "cache")


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

    def __str__(self) -> str:
        line = f"{'ok  ' if self.passed else 'FAIL'} {self.check.name:<18}{self.seconds:6.1f} s"
        return line if self.passed else f"{line}\n{self.output}"


def tool(name: str) -> str:
    return str(BIN / name)


def checks() -> list[Check]:
    """The slowest checks start first, so that the other checks run at the same time on the other cores."""
    found = [
        Check(name="mypy --strict", command=(tool("mypy"),)),
        Check(name="pyrefly", command=(tool("pyrefly"), "check", "--python-interpreter-path", sys.executable)),
        Check(name="ruff check", command=(tool("ruff"), "check", "--quiet", ".")),
        Check(name="ruff format", command=(tool("ruff"), "format", "--quiet", "--check", "--diff", ".")),
        Check(name="import contracts", command=(tool("lint-imports"), "--cache-dir", str(CACHE / "imports"))),
    ]
    found.append(Check(name="generated pages", command=(sys.executable, "docs/gen.py", "--check")))
    found.append(Check(name="docs/metrics.md", command=(sys.executable, "docs/metrics_page.py", "--check")))
    found.append(Check(name="alerts", command=(sys.executable, "-m", "tests.alerts")))
    found.append(Check(name="dashboards", command=(sys.executable, "-m", "tests.dashboards")))
    found.append(Check(name="deploy/grafana", command=(sys.executable, "deploy/grafana/dashboards.py", "--check")))
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
    # Tools start other tools by name, so the tools of this installation come first in the PATH. The caches of the tools
    # are in this installation, too.
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


def main() -> int:
    failed: list[str] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for outcome in pool.map(perform, checks()):
            print(outcome, flush=True)
            if not outcome.passed:
                failed.append(outcome.check.name)
    if failed:
        print(f"failed checks: {', '.join(failed)}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
