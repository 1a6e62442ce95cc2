"""The file of `windrow workflows start`: reads a workflow from JSON.

Every error names the file, the node, the field, the value, and what is allowed there. A node is named by its name, or
by its place in the file if it has none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import typer

from cli import values
from cli.calls import as_typed
from cli.exits import CommandFailed, ExitCode, RequestRefused
from cli.input_file import opened
from windrow import Callback, FailurePolicy, Workflow

if TYPE_CHECKING:
    from windrow import Node

_SHOWN_MAX = 80
_DELAY_S_MAX = 3650 * 86_400
_NODE = re.compile(r"nodes\[(\d+)\]\.?(.*)")
# The fields of a node that are options of its job, each with its name in the client and in the contract.
_OPTIONS = {
    "priority": "priority",
    "max_attempts": "max_attempts",
    "delay_s": "delay",
    "group": "group",
    "attributes": "attributes",
}
# The reverse: the name in the file for each name in the contract.
_FIELDS = {option: name for name, option in _OPTIONS.items()}
# As _FIELDS, for a node that waits for a signal: the field `timeout` of the file is the delay of the node's job in the
# contract.
_FIELDS_OF_SIGNALS = {"delay": "timeout"}
# Checks a value. Returns None if the value is right, and otherwise what the value must be.
_Rule: TypeAlias = Callable[[Any], str | None]


class _Fault(Exception):
    """A fault of one field."""


def read(file: Path | None, workflow_id: str) -> Workflow:
    """Reads a workflow from a file, or from standard input. Raises BadParameter, CommandFailed."""
    content = sys.stdin.buffer.read() if file is None else opened(file, lambda: file.read_bytes(), hint="FILE")
    try:
        document = _parsed(content)
        fields = _given(document, {"name": _text, "nodes": _array}, "nodes", what="a workflow")
        flow = Workflow(fields.get("name", ""), id=workflow_id)
    except _Fault as fault:
        raise _failed(file, str(fault)) from fault
    for at, node in enumerate(cast("list[Any]", fields["nodes"])):
        try:
            _add(flow, node)
        except _Fault as fault:
            named = isinstance(node, dict) and cast("dict[str, Any]", node).get("name")
            raise _failed(file, f"{_label(at, named if isinstance(named, str) else '')}: {fault}") from fault
    return flow


def refused(error: RequestRefused, file: Path | None, flow: Workflow) -> RequestRefused:
    """Returns the error of a router that refuses the workflow, in the words of the file."""
    return RequestRefused(error.violations, particulars=[_told(file, flow, *fault) for fault in error.violations])


def _told(file: Path | None, flow: Workflow, field: str, description: str) -> str:
    if (found := _NODE.fullmatch(field)) is None:
        # Fields that are not in the file, such as the org and the id, come from the command line.
        place = f"{_where(file)}: {field}" if field in ("name", "nodes") else as_typed(field)
        return f"{place}: {description}"
    node = flow.nodes[int(found[1])]
    # job.template.queue is "queue" in the file, and after[0].node is "after".
    parts = [part.partition("[")[0] for part in found[2].split(".")]
    name = next((part for part in parts if part not in ("job", "template", "")), "")
    names = _FIELDS_OF_SIGNALS if node.is_signal else _FIELDS
    fault = f"{names.get(name, name)}: {description}" if name else description
    return f"{_where(file)}: {_label(int(found[1]), '' if node.is_unnamed else node.name)}: {fault}"


def _failed(file: Path | None, what: str) -> CommandFailed:
    return CommandFailed(f"{_where(file)}: {what}", ExitCode.USAGE)


def _where(file: Path | None) -> str:
    return "standard input" if file is None else str(file)


def _label(at: int, name: str) -> str:
    return f"node {name!r}" if name else f"nodes[{at}]"


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise _Fault(f"is not UTF-8: byte {error.start:,} is 0x{content[error.start]:02x}") from error
    except RecursionError as error:
        raise _Fault("is not a workflow: its arrays and objects are nested too deeply") from error
    except ValueError as error:
        raise _Fault(f"is not JSON: {error}") from error


def _add(flow: Workflow, document: Any) -> Node:
    """Adds a node of the file. Raises _Fault."""
    is_signal = isinstance(document, dict) and bool(cast("dict[str, Any]", document).get("signal"))
    node = _given(document, _RULES, "queue", "timeout" if is_signal else "kind", what="a node")
    for name in _NOT_OF_SIGNALS if is_signal else ("timeout",):
        if name in node:
            what = "a node that waits for a signal has none" if is_signal else "only a node with signal has one"
            raise _Fault(f"{name}: must not be given: {what}")
    payload = document.get("payload", "")
    content = payload if isinstance(payload, str) else json.dumps(payload)
    if (fault := _text(content)) is not None:
        raise _Fault(f"payload: must be {fault}, not {_shown(content)}")
    if is_signal:
        added = flow.signal(
            node.get("name", ""),
            node["queue"],
            timeout=values.duration(node["timeout"]),
            payload=content.encode(),
            attributes=node.get("attributes"),
        )
        return _after(added, node)
    options = {option: node[name] for name, option in _OPTIONS.items() if name in node}
    add = {None: flow.job, "on_success": flow.on_success, "on_failure": flow.on_failure, "on_end": flow.on_end}
    added = add[node.get("callback")](
        node["queue"], node["kind"], content.encode(), name=node.get("name", ""), **options
    )
    return _after(added, node)


def _after(added: Node, node: Mapping[str, Any]) -> Node:
    # A node may name later nodes of the file, so unknown names cannot be detected here. The router refuses them.
    return added.after(*node.get("after", []), on_failed=FailurePolicy(node.get("on_failed", "cancel")))


def _given(document: Any, rules: Mapping[str, _Rule], *required: str, what: str) -> dict[str, Any]:
    """Checks the fields of an object, and returns them. A field that is null counts as absent. `what`: the kind of
    object. Raises _Fault if a field is wrong, is missing or is unknown."""
    if not isinstance(document, dict):
        raise _Fault(f"must be an object with {' and '.join(map(_shown, required))}, not {_shown(document)}")
    fields = cast("dict[str, Any]", document)
    if unknown := sorted(set(fields) - {*rules}):
        raise _Fault(f"{_shown(unknown[0])}: is no field of {what}: those are {', '.join(rules)}")
    given = {name: value for name, value in fields.items() if name in rules and value is not None}
    for name in required:
        if name not in given:
            raise _Fault(f"{name}: is missing")
    for name, value in given.items():
        if (fault := rules[name](value)) is not None:
            raise _Fault(f"{name}: must be {fault}, not {_shown(value)}")
    return given


def _shown(value: Any) -> str:
    """Returns a value as the file writes it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


# ── Rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _array(value: Any) -> str | None:
    return None if isinstance(value, list) else "an array"


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        return "a text"
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can contain half of a surrogate pair, which is no valid text.
        return "a text without halves of characters"
    return None


def _one_of(*words: str) -> _Rule:
    return lambda value: None if value in words else f"one of {', '.join(words)}"


def _whole(last: int) -> _Rule:
    def rule(value: Any) -> str | None:
        # `True` is an `int` in Python, but no number in JSON.
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return None if is_whole and 1 <= value <= last else f"a whole number from 1 to {last:,}"

    return rule


def _delay(value: Any) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and 0 <= value <= _DELAY_S_MAX else f"a number of seconds from 0 to {_DELAY_S_MAX:,}"


def _duration(value: Any) -> str | None:
    try:
        return None if isinstance(value, str) and values.duration(value) else "a duration, such as 3d or 1h30m"
    except typer.BadParameter:
        return "a duration, such as 3d or 1h30m"


def _names(value: Any) -> str | None:
    names: list[Any] = value if isinstance(value, list) else [None]
    return None if all(_text(name) is None for name in names) else "an array of names of nodes"


def _labels(value: Any) -> str | None:
    pairs = cast("dict[str, Any]", value).items() if isinstance(value, dict) else [(None, None)]
    return None if all(_text(part) is None for pair in pairs for part in pair) else "an object whose values are texts"


_RULES: Mapping[str, _Rule] = {
    "queue": _text,
    "kind": _text,
    "name": _text,
    "payload": lambda _: None,
    "after": _names,
    "on_failed": _one_of(*(policy.value for policy in FailurePolicy if policy is not FailurePolicy.UNKNOWN)),
    "callback": _one_of(*(callback.value for callback in Callback if callback is not Callback.UNKNOWN)),
    "priority": _whole(9),
    "max_attempts": _whole(1000),
    "delay_s": _delay,
    "group": _text,
    "attributes": _labels,
    "signal": lambda value: None if isinstance(value, bool) else "true or false",
    "timeout": _duration,
}
# The fields that a node with `signal` must not have.
_NOT_OF_SIGNALS = ("kind", "callback", "priority", "max_attempts", "delay_s", "group")
