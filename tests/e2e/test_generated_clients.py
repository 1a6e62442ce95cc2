"""docs/clients.md: its commands build a client in each language, which then stores a job and works on it.

By default, the tests run only the steps that need no tool of the language. `./run test --generators` runs the commands,
and skips a language whose tools are not on this machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import grpc
import pytest

from tests.e2e.conftest import RunningCluster
from tests.effort import GENERATORS
from tests.generators import BUILD_S, LANGUAGES, PAGE, ROOT, Language, ToolMissing, build
from tests.routers import PATIENCE_S
from windrow.v1 import admin_pb2, admin_pb2_grpc

EXAMPLES = ROOT / "examples/clients"
every_language = pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.folder)


@every_language
def test_the_page_shows_two_steps_and_only_code_that_the_program_has(language: Language) -> None:
    assert [kind for kind, _ in language.blocks][:2] == ["sh", "sh"]
    assert language.build.startswith(f'cp -R "$WINDROW/examples/clients/{language.folder}" cards\ncd cards\n')
    programs = [path.read_text() for path in language.example.rglob("*") if path.suffix in SOURCES]
    assert language.code
    for shown in language.code:
        assert any(_unindented(shown) in _unindented(program) for program in programs), shown


SOURCES = {".go", ".ts", ".java", ".rs", ".cc"}


def _unindented(text: str) -> str:
    return "".join(f"{line.strip()}\n" for line in text.splitlines())


def test_every_example_has_a_section() -> None:
    tracked = subprocess.run(["git", "ls-files", str(EXAMPLES)], cwd=ROOT, capture_output=True, text=True, check=True)
    folders = {Path(path).relative_to("examples/clients").parts[0] for path in tracked.stdout.splitlines()}
    assert folders - {".gitignore"} == {language.folder for language in LANGUAGES}


def test_the_page_names_the_releases_that_the_examples_pin() -> None:
    table = PAGE.read_text().partition("| pinned |\n|---|---|---|\n")[2].partition("\n| C++ |")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    named = {language: dict(part.rsplit(" ", 1) for part in pins.split(", ")) for language, _, pins in rows}

    def packages(folder: str) -> dict[str, str]:
        package = json.loads((EXAMPLES / folder / "package.json").read_text())
        pinned: dict[str, str] = package["dependencies"] | package["devDependencies"]
        return {name.rpartition("/")[2]: pin for name, pin in pinned.items()}

    go = dict(re.findall(r"^\s+(google\.golang\.org/\S+) v(\S+)", (EXAMPLES / "go/go.mod").read_text(), re.MULTILINE))
    assert named["Go"] == {
        "grpc": go["google.golang.org/grpc"],
        "protobuf": go["google.golang.org/protobuf"],
        "protoc-gen-go-grpc": go["google.golang.org/grpc/cmd/protoc-gen-go-grpc"],
    }
    for language, folder in (("TypeScript, grpc-js", "grpc-js"), ("TypeScript, connect-es", "connect-es")):
        pinned = packages(folder)
        assert named[language] == {name: pinned[name.lower()] for name in named[language]}
    pom = (EXAMPLES / "java/pom.xml").read_text()
    plugin = re.search(r"<artifactId>protobuf-maven-plugin</artifactId>\s*<version>(.+?)<", pom)
    assert plugin is not None
    properties = dict(re.findall(r"<(grpc|protobuf)\.version>(.+?)<", pom))
    assert named["Java"] == {**properties, "protobuf-maven-plugin": plugin[1]}
    crates = dict(re.findall(r'^(\w+) = "=(.+?)"', (EXAMPLES / "rust/Cargo.toml").read_text(), re.MULTILINE))
    assert named["Rust"] == {name: crates[name] for name in ("tonic", "prost")}


def test_locks_name_no_registry() -> None:
    locks = [*EXAMPLES.glob("*/package-lock.json")]
    assert locks
    for lock in locks:
        assert '"resolved"' not in lock.read_text()


@pytest.mark.skipif(not GENERATORS, reason="downloads packages, and takes minutes: ./run test --generators")
@pytest.mark.timeout(BUILD_S + 300)
@every_language
def test_the_commands_build_a_client_that_works_its_job_although_the_router_is_away_and_killed(
    language: Language, cluster: RunningCluster, tmp_path: Path
) -> None:
    try:
        folder = build(language, tmp_path)
    except ToolMissing as error:
        pytest.skip(str(error))
    queue = f"cards-{language.folder}"
    admin(cluster, "CreateQueue", queue)
    # The program waits for its job until the queue is resumed.
    admin(cluster, "PauseQueue", queue)
    cluster.kill()
    serving = False
    with subprocess.Popen(
        language.run,
        cwd=folder,
        env=os.environ | {"WINDROW_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stderr is not None
            tries = (line for line in program.stderr if "another try after" in line)
            first = next(tries, None)
            cluster.start()
            serving = True
            stored = program.stdout.readline()
            cluster.kill()
            serving = False
            second = next(tries, None)
            cluster.start()
            serving = True
            admin(cluster, "ResumeQueue", queue)
            out, errors = program.communicate(timeout=2 * PATIENCE_S)
        finally:
            program.kill()
            if not serving:
                cluster.start()
    assert program.returncode == 0, errors
    assert None not in (first, second), errors
    assert re.fullmatch(r"stored [0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}\n", stored)
    assert out.splitlines() == ["a card to ada", "acked JOB_ANSWER_OK", "refused jobs[0].template.queue"]


def admin(cluster: RunningCluster, verb: str, queue: str) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        call = getattr(admin_pb2_grpc.AdminStub(channel), verb)
        request = getattr(admin_pb2, f"{verb}Request")(org="acme", queue=queue)
        call(request, timeout=PATIENCE_S, wait_for_ready=True)
