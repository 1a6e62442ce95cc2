"""`./run test`: runs the checks and the tests. Decides which tests run, how many trials each test makes, and how many
tests run at once."""

import argparse
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType

from tests import changed
from tests.checks import ROOT

CORES = os.cpu_count() or 1
# A test spends half of its time waiting, for example for processes that start or leases that expire. On a machine with
# two cores, four workers left the cores idle for an eighth of the time. Six workers leave them idle for a fiftieth of
# the time.
WORKERS = 3 * CORES
# The tests of a file stay on one worker and share its clusters and routers. tests/conftest.py sorts the files: the
# slowest files start first, so that no worker still runs a slow file when the other workers are done.
SIDE_BY_SIDE = ("-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder")

# The tests of `--generators`.
CLIENTS = "tests/e2e/test_generated_clients.py"

HELP = """\
Without arguments: every check, then every test, several at once. Of tests that start whole programs, and of those that
take much time and resemble each other, one in three or so runs, each hour others. `./run test tests` runs them all.

With arguments for pytest: the checks, then those tests one after another, so that -x, -s and --pdb work as in pytest.
For example: ./run test -k fencing
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    checks: bool
    # Arguments for pytest. None: there is nothing to run.
    arguments: tuple[str, ...] | None
    environ: dict[str, str]
    # Printed first, and again when a test has failed.
    said: str = ""


def parse(given: Sequence[str]) -> Wanted:
    """Reads the command line. Raises SystemExit if it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="./run test",
        description=HELP,
        epilog="All other arguments are pytest's.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--changed",
        action="store_true",
        help="only test files that the changes since the merge base with the main branch can touch, nearest first, "
        "for about two minutes; tests/e2e and tests/fault only if they or their helpers changed; no checks",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="only the tests that try many things at random, with many more tries than usual; no checks",
    )
    parser.add_argument(
        "--seed",
        metavar="TEXT",
        help="with --thorough: what is drawn at random, and in which order the test files run; default: a new one",
    )
    parser.add_argument(
        "--minutes", metavar="N", type=float, help="with --thorough: begin no test after so many minutes"
    )
    parser.add_argument(
        "--part", metavar="N", type=int, help="with --thorough: only one of N tests, chosen by the seed"
    )
    parser.add_argument(
        "--generators",
        action="store_true",
        help="only the builds of docs/clients.md, in each language whose tools are installed; they download packages, "
        "and take minutes; no checks",
    )
    options, rest = parser.parse_known_args(given)
    if options.changed + options.thorough + options.generators > 1:
        parser.error("--changed, --thorough and --generators exclude one another")
    if not options.thorough and (options.seed, options.minutes, options.part) != (None, None, None):
        parser.error("--seed, --minutes and --part need --thorough")
    if options.part is not None and options.part < 1:
        parser.error(f"--part is {options.part}, and must be at least 1")
    how = () if rest else SIDE_BY_SIDE
    if options.changed:
        choice = changed.choose(workers=WORKERS)
        arguments = (*SIDE_BY_SIDE, *choice.files, *rest) if choice.files else None
        return Wanted(checks=False, arguments=arguments, environ={}, said=str(choice))
    if options.generators:
        # The builds run one after another, because each build takes all cores. `-rs` names the skipped languages with
        # the reason.
        return Wanted(checks=False, arguments=("-rs", CLIENTS, *rest), environ={"WINDROW_GENERATORS": "1"})
    if options.thorough:
        seed = options.seed or secrets.token_hex(4)
        environ = {"WINDROW_THOROUGH": "1", "WINDROW_SEED": seed}
        if options.minutes is not None:
            environ["WINDROW_TEST_MINUTES"] = str(options.minutes)
        if options.part is not None:
            environ["WINDROW_TEST_PART"] = str(options.part)
        number = int.from_bytes(seed.encode()) % 2**32
        return Wanted(
            checks=False,
            arguments=(*how, f"--hypothesis-seed={number}", *rest),
            environ=environ,
            said=f"seed {seed}; the same again, for one test: ./run test --thorough --seed {seed} TEST",
        )
    if rest:
        return Wanted(checks=True, arguments=(*how, *rest), environ={})
    return Wanted(checks=True, arguments=how, environ={"WINDROW_TEST_TURN": str(turn_of(datetime.now(UTC)))})


def turn_of(now: datetime) -> int:
    """Returns the number that chooses among the tests that take turns (tests/effort.py). It changes each hour."""
    return int(now.timestamp()) // 3600


def run_tests(arguments: Sequence[str], environ: dict[str, str], beside: subprocess.Popen[bytes] | None = None) -> int:
    running = [] if beside is None else [beside]
    interrupted = False

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        for one in running:
            one.terminate()

    # A terminal sends Ctrl-C to the child processes, too. SIGTERM must be passed on to them.
    signal.signal(signal.SIGTERM, pass_on)

    def pytest(*given: str, stdout: int | None = None) -> int:
        nonlocal interrupted
        tests = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *given], cwd=ROOT, env=os.environ | environ, stdout=stdout
        )
        running.append(tests)
        while tests.returncode is None:
            try:
                tests.wait()
            except KeyboardInterrupt:
                interrupted = True
        return tests.returncode

    code = 0
    if "-n" in arguments and not any(ROOT.glob("tests/__pycache__/conftest.*")):
        # A new clone has no bytecode. Compile the tests and their imports once. Otherwise all workers would compile all
        # of them at the same time. If a test cannot be imported, the workers report why.
        code = pytest("--collect-only", stdout=subprocess.DEVNULL)
    if code >= 0 and not interrupted:
        code = pytest("--durations=15", *arguments)
    # The exit code as in a shell: 128 plus the number of the signal.
    return code if code >= 0 else 128 - code


def main(given: Sequence[str]) -> int:
    wanted = parse(given)
    if wanted.said:
        print(wanted.said, flush=True)
    if wanted.arguments is None:
        return 0
    if not wanted.checks:
        code = run_tests(wanted.arguments, wanted.environ)
        if code and wanted.said:
            print(wanted.said, flush=True)
        return code
    # At a lower priority, the checks leave most of the CPU time to the tests. At the lowest priority, the checks would
    # make hardly any progress while other programs keep the cores busy. The tests run even if a check fails, so that
    # one run reports everything that is wrong.
    checking = subprocess.Popen([sys.executable, "-m", "tests.checks"], cwd=ROOT, preexec_fn=lambda: os.nice(5))
    if "-n" not in wanted.arguments:
        # A person watches the output of these tests, so the checks must not print anything at the same time.
        checking.wait()
    failed = run_tests(wanted.arguments, wanted.environ, checking)
    return checking.wait() or failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
