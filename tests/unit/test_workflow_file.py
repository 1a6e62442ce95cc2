"""If a file is not a valid workflow, `windrow workflows start` names the file, the node, the field, the value, and the
allowed values."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cli import workflow_file
from cli.exits import ExitCode, RequestRefused
from tests.command import windrow
from windrow import FailurePolicy

NODE = {"queue": "q", "kind": "k"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "flow.json"


def start(file: Path) -> tuple[int, str]:
    """Returns the exit code, and standard error without its line breaks."""
    done = windrow("workflows", "start", "acme", str(file))
    assert done.out == ""
    return done.code, " ".join(done.err.replace("│", " ").split())


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    for path, why in ((Path("/nope.json"), "No such file or directory"), (tmp_path, "Is a directory")):
        code, told = start(path)
        assert code == ExitCode.USAGE
        assert "Invalid value for 'FILE'" in told
        assert why in told


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"nodes": "\xff"}', "is not UTF-8: byte 11 is 0xff"),
        (b"{", "is not JSON: Expecting property name"),
        (b"[" * 100_000, "is not a workflow: its arrays and objects are nested too deeply"),
        (b"[1]", 'must be an object with "nodes", not [1]'),
        (b"{}", "nodes: is missing"),
        (b'{"nodes": {}}', "nodes: must be an array, not {}"),
        (b'{"name": 1, "nodes": []}', "name: must be a text, not 1"),
        (b'{"nodes": [], "org": "acme"}', '"org": is no field of a workflow: those are name, nodes'),
        (b'{"nodes": [1]}', 'nodes[0]: must be an object with "queue" and "kind", not 1'),
    ],
)
def test_a_file_that_has_no_workflow_is_named_with_what_it_has(file: Path, content: bytes, why: str) -> None:
    file.write_bytes(content)
    code, told = start(file)
    assert code == ExitCode.USAGE
    assert told.startswith(f"windrow: {file}: {why}")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"queue": None}, "queue: is missing"),
        ({"kind": 5}, "kind: must be a text, not 5"),
        ({"priority": "high"}, 'priority: must be a whole number from 1 to 9, not "high"'),
        ({"priority": 0}, "priority: must be a whole number from 1 to 9, not 0"),
        ({"priority": True}, "priority: must be a whole number from 1 to 9, not true"),
        ({"max_attempts": 1001}, "max_attempts: must be a whole number from 1 to 1,000, not 1001"),
        ({"delay_s": -1}, "delay_s: must be a number of seconds from 0 to 315,360,000, not -1"),
        ({"delay_s": float("nan")}, "delay_s: must be a number of seconds from 0 to 315,360,000, not NaN"),
        ({"on_failed": "explode"}, 'on_failed: must be one of cancel, ignore, run, not "explode"'),
        ({"callback": "later"}, 'callback: must be one of on_success, on_failure, on_end, not "later"'),
        ({"after": "first"}, 'after: must be an array of names of nodes, not "first"'),
        ({"after": [1]}, "after: must be an array of names of nodes, not [1]"),
        ({"group": 5}, "group: must be a text, not 5"),
        ({"attributes": {"a": 1}}, 'attributes: must be an object whose values are texts, not {"a": 1}'),
        ({"attributes": []}, "attributes: must be an object whose values are texts, not []"),
        ({"payload": "\ud800"}, "payload: must be a text without halves of characters, not"),
        ({"timeout": "3d"}, "timeout: must not be given: only a node with signal has one"),
        ({"signal": "yes"}, "timeout: is missing"),
        ({"signal": True}, "timeout: is missing"),
        ({"signal": True, "timeout": "soon"}, 'timeout: must be a duration, such as 3d or 1h30m, not "soon"'),
        ({"signal": True, "timeout": 3}, "timeout: must be a duration, such as 3d or 1h30m, not 3"),
        ({"signal": True, "timeout": "0"}, 'timeout: must be a duration, such as 3d or 1h30m, not "0"'),
        ({"signal": 1, "timeout": "3d"}, "signal: must be true or false, not 1"),
        ({"signal": True, "timeout": "3d"}, "kind: must not be given: a node that waits for a signal has none"),
        ({"kind": None, "signal": True, "timeout": "3d", "delay_s": 1}, "delay_s: must not be given: a node that"),
        ({"prioriti": 1}, '"prioriti": is no field of a node: those are queue, kind, name, payload, after,'),
    ],
)
def test_a_fault_is_told_with_its_node_its_field_its_value_and_what_is_allowed(
    file: Path, fields: dict[str, Any], why: str
) -> None:
    for node, label in (({"name": "load"}, "node 'load'"), ({}, "nodes[1]")):
        file.write_text(json.dumps({"nodes": [NODE, {**NODE, **node, **fields}]}))
        code, told = start(file)
        assert code == ExitCode.USAGE
        assert told.startswith(f"windrow: {file}: {label}: {why}")


def test_a_workflow_from_standard_input_is_named_so() -> None:
    done = windrow(
        "workflows", "start", "acme", stdin=json.dumps({"nodes": [{**NODE, "name": "load", "priority": 10}]})
    )
    assert done.code == ExitCode.USAGE
    assert done.err.startswith("windrow: standard input: node 'load': priority: must be a whole number from 1 to 9")


def test_a_value_that_is_long_is_cut(file: Path) -> None:
    file.write_text(json.dumps({"nodes": ["x" * 10_000]}))
    assert len(start(file)[1]) < 400


def test_what_a_router_refuses_is_told_in_the_words_of_the_file(file: Path) -> None:
    file.write_text(json.dumps({"nodes": [NODE, {**NODE, "name": "load"}]}))
    flow = workflow_file.read(file, "")
    refusal = RequestRefused(
        [
            ("nodes[1].after[0].node", "names no node of the workflow: 'x'"),
            ("nodes[0].job.template.queue", "must not be empty"),
            ("nodes[0].job.delay", "must be less"),
            ("nodes[1].job", "is missing"),
            ("nodes", "must have at least one that is not a callback"),
            ("name", "must be at most 128 bytes"),
            ("org", "must not be empty"),
            ("id", "is too old"),
        ],
        particulars=[],
    )
    assert workflow_file.refused(refusal, file, flow).particulars == [
        f"{file}: node 'load': after: names no node of the workflow: 'x'",
        f"{file}: nodes[0]: queue: must not be empty",
        f"{file}: nodes[0]: delay_s: must be less",
        f"{file}: node 'load': is missing",
        f"{file}: nodes: must have at least one that is not a callback",
        f"{file}: name: must be at most 128 bytes",
        "ORG: must not be empty",
        "--id: is too old",
    ]


def test_all_fields_of_a_node_become_those_of_its_job(file: Path) -> None:
    options = {"priority": 2, "max_attempts": 3, "delay_s": 1.5, "group": "g", "attributes": {"a": "b"}}
    last = {"name": "last", "after": ["k"], "on_failed": "ignore", "payload": {"day": 1}, **options}
    callback = {**NODE, "callback": "on_end", "name": None, "group": None}
    file.write_text(json.dumps({"name": "nightly", "nodes": [NODE, {**NODE, **last}, callback]}))
    flow = workflow_file.read(file, "")
    first, second, third = flow.request("acme").nodes
    assert (flow.name, first.name, second.name, third.name) == ("nightly", "k", "last", "k-2")
    assert flow.nodes[1].waits_for == {"k": FailurePolicy.IGNORE}
    assert json.loads(second.job.template.payload) == {"day": 1}
    assert (second.job.template.priority, second.job.template.max_attempts) == (2, 3)
    assert (second.job.template.group, dict(second.job.template.attributes)) == ("g", {"a": "b"})
    assert second.job.delay.ToTimedelta() == timedelta(seconds=1.5)
    assert (first.job.template.payload, bool(third.callback)) == (b"", True)


def test_a_node_that_waits_for_a_signal_has_a_time_limit_and_no_kind(file: Path) -> None:
    waits = {"name": "approved", "signal": True, "queue": "deploy", "timeout": "3d", "after": ["k"], "payload": "why"}
    file.write_text(json.dumps({"nodes": [NODE, waits, {**NODE, "after": ["approved"], "signal": False}]}))
    flow = workflow_file.read(file, "")
    first, second, third = flow.request("acme").nodes
    assert (first.signal, second.signal, third.signal) == (False, True, False)
    assert (second.name, second.job.template.queue, second.job.template.payload) == ("approved", "deploy", b"why")
    assert second.job.delay.ToTimedelta() == timedelta(days=3)
    assert [edge.node for edge in second.after] == ["k"]
    refusal = RequestRefused([("nodes[1].job.delay", "must be less")], particulars=[])
    assert workflow_file.refused(refusal, file, flow).particulars == [f"{file}: node 'approved': timeout: must be less"]
