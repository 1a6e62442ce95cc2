"""The contract for generators of other languages: the copies of the protos without rules, the options of the files, and
the service config."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import Message

from router.gate.audit import CLUSTER_CHANGES
from windrow.v1 import access_pb2, admin_pb2, cluster_pb2, queue_pb2, queue_pb2_grpc, schedules_pb2, workflows_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
RULES = "buf/validate/validate.proto"
CONFIG = PROTO / "windrow/v1/service_config.json"
without_rules: Callable[[str], str] = runpy.run_path(str(PROTO / "plain.py"))["without_rules"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([str(ROOT / "run"), "gen", "--plain", str(folder)], check=True, capture_output=True)
    return folder


# This `protoc` has only one generator built in, the one for Python.
GRPC_TOOLS = (sys.executable, "-m", "grpc_tools.protoc")


def protoc(folder: Path, *arguments: str, command: Sequence[str] = GRPC_TOOLS) -> None:
    sources = sorted(str(path.relative_to(folder)) for path in folder.glob("windrow/v1/*.proto"))
    rpc = [f"google/rpc/{name}.proto" for name in ("code", "error_details", "status")]
    done = subprocess.run(
        [*command, "-I.", *arguments, *sources, *rpc], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def compiled(folder: Path, into: Path) -> dict[str, FileDescriptorProto]:
    protoc(folder, "--include_source_info", f"--descriptor_set_out={into}")
    return {file.name: file for file in FileDescriptorSet.FromString(into.read_bytes()).file}


def messages_in(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                yield from messages_in(one)


def without_options(file: FileDescriptorProto) -> FileDescriptorProto:
    """Returns a file as generators that ignore rules see it. The rules are options that this process does not know."""
    stripped = FileDescriptorProto()
    stripped.CopyFrom(file)
    stripped.ClearField("source_code_info")
    stripped.dependency[:] = [path for path in stripped.dependency if path != RULES]
    for message in messages_in(stripped):
        message.DiscardUnknownFields()
        field = message.DESCRIPTOR.fields_by_name.get("options")
        if field is not None and message.HasField("options") and not message.options.ListFields():  # type: ignore[attr-defined]
            message.ClearField("options")
    return stripped


def comments(file: FileDescriptorProto) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Returns every comment, by the path of the element that the comment explains. Comments of imports are left out,
    because their paths contain the numbers of the imports."""
    return {
        tuple(place.path): (*place.leading_detached_comments, place.leading_comments, place.trailing_comments)
        for place in file.source_code_info.location
        if (place.leading_comments or place.trailing_comments or place.leading_detached_comments)
        and place.path[:1] != [FileDescriptorProto.DEPENDENCY_FIELD_NUMBER]
    }


def test_the_copies_say_the_same_as_the_originals_without_rules(plain: Path, tmp_path: Path) -> None:
    originals, copies = compiled(PROTO, tmp_path / "originals"), compiled(plain, tmp_path / "copies")
    assert set(originals) == set(copies)
    for name, copy in copies.items():
        assert without_options(copy) == without_options(originals[name])
        assert RULES not in copy.dependency
        assert b"buf.validate" not in copy.SerializeToString()
        assert comments(copy) == comments(originals[name])
    assert len(comments(copies["windrow/v1/queue.proto"])) > 50


def test_nothing_but_rules_is_missing_in_a_copy(plain: Path) -> None:
    """Each line of a copy is a line of the original, or the text of such a line before its rules."""
    for path in PROTO.glob("windrow/v1/*.proto"):
        original = path.read_text().splitlines()
        for line in (plain / path.relative_to(PROTO)).read_text().splitlines():
            assert line in original or any(one.startswith(f"{line[:-1]} [(buf.validate.") for one in original)


def test_what_looks_like_a_rule_stays_if_it_is_none() -> None:
    text = """
import "other/buf/validate/validate.proto";  // import "buf/validate/validate.proto";
option (buf.other).thing = true;
message A {
  // string a = 1 [(buf.validate.field).required = true];
  string b = 2 [deprecated = true, (buf.validate.field).string = {pattern: "];[", in: ["x", "]"]}, json_name = "[c]"];
  /* [(buf.validate.field) */ string d = 3 [ (buf.validate.field).cel = {id: "a" expression: 'b'} ]; // why
  oneof e {
    option (buf.validate.oneof).required = true;
    string f = 4 [deprecated = false];
  }
  option (buf.validate.message).cel = {
    id: "}"
  };
  string g = 5;
}
"""
    assert (
        without_rules(text)
        == """
import "other/buf/validate/validate.proto";  // import "buf/validate/validate.proto";
option (buf.other).thing = true;
message A {
  // string a = 1 [(buf.validate.field).required = true];
  string b = 2 [deprecated = true, json_name = "[c]"];
  /* [(buf.validate.field) */ string d = 3; // why
  oneof e {
    string f = 4 [deprecated = false];
  }
  string g = 5;
}
"""
    )


@pytest.mark.parametrize("given", [[], ["a", "b"], [str(PROTO)]])
def test_copies_need_one_folder_that_is_not_the_originals(given: list[str]) -> None:
    done = subprocess.run([str(ROOT / "run"), "gen", "--plain", *given], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr


@pytest.mark.parametrize("language", ["cpp", "csharp", "java", "kotlin", "objc", "php", "pyi", "python", "ruby"])
def test_every_generator_of_protoc_takes_the_copies(language: str, plain: Path, tmp_path: Path) -> None:
    command: Sequence[str] = GRPC_TOOLS
    if language not in ("pyi", "python"):
        own = shutil.which("protoc", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if own is None:
            pytest.skip("no protoc on this machine")
        command = [own]
    protoc(plain, f"--{language}_out={tmp_path}", command=command)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"CreateQueueRequest" in written
    if language not in ("pyi", "python"):
        assert b"buf/validate" not in written


def test_each_file_names_its_package_for_every_language(plain: Path, tmp_path: Path) -> None:
    for name, file in compiled(plain, tmp_path / "copies").items():
        if not name.startswith("windrow/"):
            continue
        assert file.options.go_package == "github.com/windrow-dev/windrow/gen/go/windrow/v1;windrowv1"
        assert (file.options.java_package, file.options.java_multiple_files) == ("dev.windrow.v1", True)
        assert file.options.csharp_namespace == "Windrow.V1"
        assert file.options.ruby_package == "Windrow::V1"
        assert file.options.php_namespace == "Windrow\\V1"


def test_the_files_for_errors_are_those_that_the_python_client_uses() -> None:
    import google.rpc

    installed = [Path(folder) for folder in google.rpc.__path__]
    for ours in PROTO.glob("google/rpc/*.proto"):
        assert ours.read_bytes() in [(folder / ours.name).read_bytes() for folder in installed]


# service_config.json

_METHODS = {
    f"{service.full_name}/{method.name}": method
    for file in (
        queue_pb2.DESCRIPTOR,
        admin_pb2.DESCRIPTOR,
        cluster_pb2.DESCRIPTOR,
        schedules_pb2.DESCRIPTOR,
        workflows_pb2.DESCRIPTOR,
    )
    for service in file.services_by_name.values()
    for method in service.methods
}
_REPEATABLE = {name for name, method in _METHODS.items() if method.GetOptions().Extensions[access_pb2.repeatable]}


def test_every_unary_call_is_repeatable_that_changes_nothing_or_that_a_consumer_or_producer_makes_with_ids() -> None:
    unary = {name for name, method in _METHODS.items() if not (method.client_streaming or method.server_streaming)}
    queue = {name for name in unary if name.startswith("windrow.v1.Queue/")}
    changing = CLUSTER_CHANGES | {
        name
        for name, method in _METHODS.items()
        if method.GetOptions().Extensions[access_pb2.scope] in (access_pb2.SCOPE_ADMIN, access_pb2.SCOPE_ENQUEUE)
    }
    # Jobs without an id would be stored twice.
    assert (queue - {"windrow.v1.Queue/Enqueue"}) | (unary - queue - changing) == _REPEATABLE


def test_the_service_config_names_every_call_that_is_marked_as_repeatable() -> None:
    (policy,) = json.loads(CONFIG.read_text())["methodConfig"]
    assert {f"{name['service']}/{name['method']}" for name in policy["name"]} == _REPEATABLE


def test_the_page_shows_the_retry_policy_of_the_service_config() -> None:
    page = (ROOT / "docs/clients.md").read_text()
    (shown,) = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (policy,) = json.loads(CONFIG.read_text())["methodConfig"]
    assert json.loads(f"{{{shown}}}") == {"retryPolicy": policy["retryPolicy"]}


@contextmanager
def failing_server(method: str, code: grpc.StatusCode, *, times: int) -> Generator[tuple[str, list[None]]]:
    """Starts a server whose method fails this many times, and then answers. Yields its address and a list with an entry
    for each call."""
    calls: list[None] = []

    def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
        calls.append(None)
        if len(calls) <= times:
            context.abort(code, "not yet")
        return b""

    handler = grpc.method_handlers_generic_handler(
        "windrow.v1.Queue",
        {method: grpc.unary_unary_rpc_method_handler(answer)},  # pyrefly: ignore[bad-argument-type]
    )
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", calls
    finally:
        server.stop(None).wait()


def ack(address: str) -> queue_pb2.AckResponse:
    with grpc.insecure_channel(address, options=[("grpc.service_config", CONFIG.read_text())]) as channel:
        return queue_pb2_grpc.QueueStub(channel).Ack(queue_pb2.AckRequest(org="acme"), timeout=60)


def enqueue(address: str) -> queue_pb2.EnqueueResponse:
    with grpc.insecure_channel(address, options=[("grpc.service_config", CONFIG.read_text())]) as channel:
        return queue_pb2_grpc.QueueStub(channel).Enqueue(queue_pb2.EnqueueRequest(org="acme"), timeout=60)


def test_grpc_takes_the_service_config_and_repeats_calls_that_are_unavailable() -> None:
    with failing_server("Ack", grpc.StatusCode.UNAVAILABLE, times=4) as (address, calls):
        assert ack(address) == queue_pb2.AckResponse()
        assert len(calls) == 5


def test_grpc_does_not_repeat_an_enqueue_whose_jobs_may_have_no_ids() -> None:
    with failing_server("Enqueue", grpc.StatusCode.UNAVAILABLE, times=1) as (address, calls):
        with pytest.raises(grpc.RpcError):
            enqueue(address)
        assert len(calls) == 1


@pytest.mark.parametrize(("code", "tries"), [(grpc.StatusCode.UNAVAILABLE, 5), (grpc.StatusCode.INVALID_ARGUMENT, 1)])
def test_grpc_gives_up_after_five_tries_and_at_once_if_the_request_is_bad(code: grpc.StatusCode, tries: int) -> None:
    with failing_server("Ack", code, times=9) as (address, calls):
        with pytest.raises(grpc.RpcError) as failed:
            ack(address)
        assert failed.value.code() is code
        assert len(calls) == tries


def test_the_pauses_of_the_policy_grow_to_their_maximum() -> None:
    (policy,) = json.loads(CONFIG.read_text())["methodConfig"]
    retry = policy["retryPolicy"]
    first, most = (float(retry[key].removesuffix("s")) for key in ("initialBackoff", "maxBackoff"))
    pauses = [min(first * retry["backoffMultiplier"] ** step, most) for step in range(retry["maxAttempts"] - 1)]
    assert all(before <= after for before, after in pairwise(pauses))
