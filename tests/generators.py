"""The sections of docs/clients.md, one for each language. A section has commands that build a client, the command that
runs this client, and code.

The commands run unchanged in an empty folder, with the variable WINDROW as the page says. If no `protoc` is installed,
the `protoc` of grpcio-tools is used, which the page allows for some languages.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/clients.md"
# The first build of a language downloads everything, and on a busy machine compiles for minutes.
BUILD_S = 1500.0

_SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class ToolMissing(Exception):
    """This machine cannot build for the language."""


class BuildFailed(Exception):
    """A command of the page failed. The message of this error has the command's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    # The language's folder in examples/clients.
    folder: str
    heading: str
    programs: tuple[str, ...]
    # The libraries that `pkg-config` must find.
    libraries: tuple[str, ...] = ()
    # Whether the protoc of grpcio-tools is enough.
    any_protoc: bool = False

    @property
    def example(self) -> Path:
        return ROOT / "examples/clients" / self.folder

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """The code blocks of the page's section. Each one has a language and a text."""
        return _BLOCK.findall(dict(_SECTION.findall(PAGE.read_text()))[self.heading])

    @property
    def build(self) -> str:
        return self._commands[0]

    @property
    def run(self) -> list[str]:
        return shlex.split(self._commands[1])

    @property
    def code(self) -> list[str]:
        """The part of the program that the page shows."""
        return [text for kind, text in self.blocks if kind != "sh"]

    @property
    def _commands(self) -> list[str]:
        return [text for kind, text in self.blocks if kind == "sh"]

    def require_tools(self) -> None:
        """Raises ToolMissing if a program or a library that the build needs is not installed."""
        programs = [*self.programs, *(() if self.any_protoc else ("protoc",))]
        if missing := [name for name in programs if shutil.which(name) is None]:
            raise ToolMissing(f"not on the PATH: {', '.join(missing)}")
        for library in self.libraries:
            if subprocess.run(["pkg-config", "--exists", library], check=False).returncode:
                raise ToolMissing(f"pkg-config does not find {library}")


LANGUAGES = (
    Language(folder="go", heading="Go", programs=("go",), any_protoc=True),
    Language(folder="grpc-js", heading="TypeScript with grpc-js", programs=("node", "npm"), any_protoc=True),
    Language(folder="connect-es", heading="TypeScript with connect-es", programs=("node", "npm"), any_protoc=True),
    # Maven downloads its own protoc.
    Language(folder="java", heading="Java", programs=("java", "mvn"), any_protoc=True),
    Language(folder="rust", heading="Rust", programs=("cargo",), any_protoc=True),
    Language(
        folder="cpp",
        heading="C++",
        programs=("g++", "pkg-config", "grpc_cpp_plugin"),
        libraries=("grpc++", "protobuf"),
    ),
)


def build(language: Language, folder: Path) -> Path:
    """Runs the page's commands in the folder, and returns the folder in which they end. Raises ToolMissing and
    BuildFailed."""
    language.require_tools()
    stand_in = folder / "bin"
    stand_in.mkdir()
    stand_in.joinpath("protoc").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m grpc_tools.protoc "$@"\n')
    stand_in.joinpath("protoc").chmod(0o755)
    # An installed protoc comes first in the PATH.
    environ = os.environ | {"WINDROW": str(ROOT), "PATH": f"{os.environ['PATH']}{os.pathsep}{stand_in}"}
    done = subprocess.run(
        ["nice", "-n", "5", "bash", "-exuc", language.build],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=BUILD_S,
    )
    if done.returncode:
        raise BuildFailed(f"the commands of {PAGE.name} for {language.heading} failed:\n{done.stdout}")
    return folder / "cards"
