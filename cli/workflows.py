"""`windrow workflows`: graphs of jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cli import options, output, values
from cli.exits import RequestRefused
from cli.input_file import payload_of, refuse_two_payloads
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from cli.calls import Router
    from windrow.v1 import workflows_pb2

_PAGE = 1000
_COUNTS = ("blocked", "released", "succeeded", "failed", "cancelled", "skipped")
# If more than this many nodes of one level are alike, they are drawn as one line. At most this many of the nodes that a
# node waits for are shown.
_ALIKE_MAX = 3
_SIGNAL_BYTES_MAX = 64 * 1024
# The characters that have a meaning in a label of Mermaid, which may contain HTML.
_MERMAID_SIGNS = frozenset('"#&<>')

app = App(help="Starts and shows graphs of jobs, and acts on them.")


class State(StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Format(StrEnum):
    TEXT = "text"
    MERMAID = "mermaid"
    DOT = "dot"
    JSON = "json"


_Id: TypeAlias = Annotated[
    str, typer.Argument(metavar="ID", parser=values.workflow_id, help="The workflow's id.", show_default=False)
]


@app.command()
def start(
    org: options.Org,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The workflow as JSON; default: standard input.", show_default=False),
    ] = None,
    workflow_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            parser=values.workflow_id,
            metavar="UUID",
            help="A UUIDv7, so that a repeated start stores nothing.",
            show_default="a new one",
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stores a workflow with all its jobs, and prints its id.

    FILE has {"name": ..., "nodes": [...]}. A node has "queue" and "kind". It may also have "name", "payload" (a text,
    or any other JSON), "after" (names of nodes), "on_failed" (cancel, ignore or run), "callback" (on_success,
    on_failure or on_end), "priority", "max_attempts", "delay_s", "group" and "attributes". A node that waits for
    `windrow workflows signal` has "signal": true, "queue" and "timeout" (such as "3d"), and may have "name", "payload",
    "after", "on_failed" and "attributes".

    Exit code 5: another workflow has this id.
    """
    from cli import workflow_file
    from cli.calls import connect

    flow = workflow_file.read(file, workflow_id or "")
    request = flow.request(org)
    try:
        with connect(address, timeout) as router:
            response = router.call(router.workflows.StartWorkflow, request)
    except RequestRefused as error:
        raise workflow_file.refused(error, file, flow) from error
    if as_json:
        jobs = {node.name: job for node, job in zip(flow.nodes, response.job_ids, strict=True)}
        output.say_json([{"org": org, "id": flow.id, "duplicate": response.duplicate, "jobs": jobs}])
    else:
        output.say(flow.id)


@app.command()
def show(
    org: options.Org,
    workflow_id: _Id,
    form: Annotated[
        Format, typer.Option("--format", help="text: a drawing for the terminal; mermaid and dot: for other programs.")
    ] = Format.TEXT,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Shows how far a workflow is, and draws it: each node below the nodes that it waits for."""
    from cli.calls import connect
    from windrow.v1 import workflows_pb2

    with connect(address, timeout) as router:
        request = workflows_pb2.GetWorkflowRequest(org=org, id=workflow_id)
        found = router.call(router.workflows.GetWorkflow, request)
        nodes = list(_nodes(router, org, workflow_id))
    if as_json or form is Format.JSON:
        counts = {state: getattr(found.counts, state) for state in _COUNTS}
        document = {**_json(found.workflow), "counts": counts, "graph": [_node_json(node) for node in nodes]}
        output.say_json([document])
    elif form is Format.MERMAID:
        output.say("\n".join(_mermaid(nodes)))
    elif form is Format.DOT:
        output.say("\n".join(_dot(nodes)))
    else:
        _print(found.workflow, found.counts)
        output.say("")
        output.table(
            [Column(title="node"), Column(title="state", coloured=True), Column(title="after"), Column(title="job")],
            list(_drawn(nodes)),
        )


@app.command("list")
def list_workflows(
    org: options.Org,
    state: Annotated[
        State | None, typer.Option("--state", show_default="all", help="Only those in this state.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many, the newest first.")] = 100,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists an org's workflows, the newest first."""
    from cli.calls import connect

    with connect(address, timeout) as router:
        found = list(_workflows(router, org, state, limit))
    if as_json:
        output.say_json(map(_json, found))
    elif not found:
        output.note(f"org {org!r} has no {'workflows' if state is None else f'{state.value} workflows'}")
    else:
        columns = [Column(title="workflow"), Column(title="name"), Column(title="state", coloured=True)]
        columns += [Column(title="nodes", right=True), Column(title="started"), Column(title="ended")]
        output.table(columns, [_row(workflow) for workflow in found])


@app.command()
def cancel(
    org: options.Org,
    workflow_id: _Id,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Stored with its jobs.")] = "cancelled",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Cancels all jobs of a workflow that have not ended, also the jobs that run."""
    from cli.calls import connect
    from windrow.v1 import workflows_pb2

    with connect(address, timeout) as router:
        request = workflows_pb2.CancelWorkflowRequest(org=org, id=workflow_id, reason=reason)
        _say(router.call(router.workflows.CancelWorkflow, request).workflow, as_json=as_json)


@app.command()
def pause(
    org: options.Org,
    workflow_id: _Id,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Releases no more jobs of a workflow. Jobs that wait for no other node still run."""
    from cli.calls import connect
    from windrow.v1 import workflows_pb2

    with connect(address, timeout) as router:
        request = workflows_pb2.PauseWorkflowRequest(org=org, id=workflow_id)
        _say(router.call(router.workflows.PauseWorkflow, request).workflow, as_json=as_json)


@app.command()
def resume(
    org: options.Org,
    workflow_id: _Id,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Ends a pause."""
    from cli.calls import connect
    from windrow.v1 import workflows_pb2

    with connect(address, timeout) as router:
        request = workflows_pb2.ResumeWorkflowRequest(org=org, id=workflow_id)
        _say(router.call(router.workflows.ResumeWorkflow, request).workflow, as_json=as_json)


@app.command()
def skip(
    org: options.Org,
    workflow_id: _Id,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name.", show_default=False)],
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Ends a node as if it had succeeded, and cancels its job.

    Exit code 5: the node has ended.
    """
    from cli.calls import connect
    from windrow.v1 import workflows_pb2

    with connect(address, timeout) as router:
        request = workflows_pb2.SkipNodeRequest(org=org, id=workflow_id, node=node)
        _say(router.call(router.workflows.SkipNode, request).workflow, as_json=as_json)


@app.command()
def signal(
    org: options.Org,
    workflow_id: _Id,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name.", show_default=False)],
    payload: Annotated[
        str | None,
        typer.Argument(
            metavar="PAYLOAD",
            help="The node's result, default empty; - reads it from standard input.",
            show_default=False,
        ),
    ] = None,
    file: options.PayloadFile = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Gives a signal to a node that waits for one.

    The node ends when the nodes that it waits for have ended, too. PAYLOAD, at most 64 KiB, is its result. The first
    signal counts: a later one changes nothing, and the command says so.

    Exit code 5: the node waits for no signal, or has ended without one.
    """
    from cli.calls import connect
    from windrow.v1 import workflows_pb2

    refuse_two_payloads(payload, file)
    content = payload_of(payload, file, bytes_max=_SIGNAL_BYTES_MAX, into="a signal")
    with connect(address, timeout) as router:
        request = workflows_pb2.SignalNodeRequest(org=org, id=workflow_id, node=node, payload=content)
        accepted = router.call(router.workflows.SignalNode, request).accepted
    if as_json:
        output.say_json([{"org": org, "id": workflow_id, "node": node, "accepted": accepted}])
    elif accepted:
        output.say(f"node {node!r} has its signal")
    else:
        output.say(f"node {node!r} had a signal before: nothing was changed")


@app.command()
def retry(
    org: options.Org,
    workflow_id: _Id,
    new_id: Annotated[
        str | None,
        typer.Option(
            "--new-id",
            parser=values.workflow_id,
            metavar="UUID",
            help="The id of the new workflow, a UUIDv7, so that the command may be repeated.",
            show_default="a new one",
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Starts a failed or cancelled workflow once more, as a new workflow, and prints the new one.

    The new workflow takes over the nodes that have succeeded or were skipped, and runs the other nodes again. The dead
    jobs of the old workflow are cancelled.

    Exit code 5: the workflow runs, has succeeded or was retried already; or a job that is to run again is live, or no
    longer exists.
    """
    from cli.calls import connect
    from windrow import uuid7
    from windrow.v1 import workflows_pb2

    with connect(address, timeout) as router:
        request = workflows_pb2.RetryWorkflowRequest(org=org, id=workflow_id, new_id=new_id or uuid7())
        response = router.call(router.workflows.RetryWorkflow, request)
    if as_json:
        output.say_json([_json(response.workflow)])
    else:
        _print(response.workflow, response.counts)


# ── Answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _nodes(router: Router, org: str, workflow_id: str) -> Iterator[workflows_pb2.NodeInfo]:
    from windrow.v1 import workflows_pb2

    token = ""
    while True:
        request = workflows_pb2.ListNodesRequest(org=org, id=workflow_id, page_size=_PAGE, page_token=token)
        response = router.call(router.workflows.ListNodes, request)
        yield from response.nodes
        token = response.next_page_token
        if not token:
            return


def _workflows(router: Router, org: str, state: State | None, limit: int) -> Iterator[workflows_pb2.WorkflowInfo]:
    from windrow.v1 import workflows_pb2

    number = (
        workflows_pb2.WORKFLOW_STATE_UNSPECIFIED
        if state is None
        else workflows_pb2.WorkflowState.Value(f"WORKFLOW_STATE_{state.name}")
    )
    token = ""
    while limit > 0:
        request = workflows_pb2.ListWorkflowsRequest(
            org=org, state=number, page_size=min(limit, _PAGE), page_token=token
        )
        response = router.call(router.workflows.ListWorkflows, request)
        yield from response.workflows
        limit -= len(response.workflows)
        token = response.next_page_token
        if not token:
            return


def _state(workflow: workflows_pb2.WorkflowInfo) -> str:
    from windrow.v1 import workflows_pb2

    return workflows_pb2.WorkflowState.Name(workflow.state).removeprefix("WORKFLOW_STATE_").lower()


def _shown_state(workflow: workflows_pb2.WorkflowInfo) -> str:
    return f"{_state(workflow)} (paused)" if workflow.paused else _state(workflow)


def _node_state(node: workflows_pb2.NodeInfo) -> str:
    from windrow.v1 import workflows_pb2

    return workflows_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()


def _policy(edge: workflows_pb2.WorkflowEdge) -> str:
    from windrow.v1 import workflows_pb2

    return workflows_pb2.FailurePolicy.Name(edge.on_failed).removeprefix("FAILURE_POLICY_").lower()


def _callback(node: workflows_pb2.NodeInfo) -> str | None:
    from windrow.v1 import workflows_pb2

    return workflows_pb2.Callback.Name(node.callback).removeprefix("CALLBACK_").lower() if node.callback else None


def _json(workflow: workflows_pb2.WorkflowInfo) -> dict[str, object]:
    from cli.messages import time_json

    return {
        "org": workflow.org,
        "id": workflow.id,
        "name": workflow.name,
        "state": _state(workflow),
        "paused": workflow.paused,
        "created_at": time_json(workflow, "created_at"),
        "ended_at": time_json(workflow, "ended_at"),
        "nodes": workflow.nodes,
        "shard": workflow.shard,
        "retry_of": workflow.retry_of or None,
    }


def _node_json(node: workflows_pb2.NodeInfo) -> dict[str, object]:
    from cli.messages import time_json

    return {
        "number": node.number,
        "name": node.name,
        "job_id": node.job_id,
        "state": _node_state(node),
        "after": {edge.node: _policy(edge) for edge in node.after},
        "callback": _callback(node),
        "ended_at": time_json(node, "ended_at"),
        "signal": node.signal,
    }


def _row(workflow: workflows_pb2.WorkflowInfo) -> list[str]:
    from cli.messages import time_shown

    times = (time_shown(workflow, "created_at"), time_shown(workflow, "ended_at"))
    return [workflow.id, workflow.name, _shown_state(workflow), f"{workflow.nodes:,}", *times]


def _say(workflow: workflows_pb2.WorkflowInfo, *, as_json: bool) -> None:
    if as_json:
        output.say_json([_json(workflow)])
    else:
        _print(workflow, None)


def _print(workflow: workflows_pb2.WorkflowInfo, counts: workflows_pb2.NodeCounts | None) -> None:
    from cli.messages import time_shown

    told = (
        ""
        if counts is None
        else ", ".join(f"{getattr(counts, state):,} {state}" for state in _COUNTS if getattr(counts, state))
    )
    output.facts(
        [
            ("workflow", workflow.id),
            ("name", workflow.name),
            ("state", _shown_state(workflow)),
            ("nodes", f"{workflow.nodes:,}" + (f": {told}" if told else "")),
            ("started", time_shown(workflow, "created_at")),
            ("ended", time_shown(workflow, "ended_at")),
            ("retries", workflow.retry_of),
            ("shard", workflow.shard),
        ]
    )


# ── Drawings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _levels(nodes: Sequence[workflows_pb2.NodeInfo]) -> dict[str, int]:
    """Returns, for each node, the length of the longest chain of nodes that it waits for."""
    after = {node.name: [edge.node for edge in node.after] for node in nodes}
    levels: dict[str, int] = {}
    # Sort the nodes. The list has the parents of a node before the node, but not the parents that the node's own job
    # has added.
    for name in TopologicalSorter(after).static_order():
        levels[name] = max((levels[parent] + 1 for parent in after.get(name, ())), default=0)
    return levels


def _drawn(nodes: Sequence[workflows_pb2.NodeInfo]) -> Iterator[list[str]]:
    """Draws a tree, with each node one step to the right of the nodes that it waits for. If more than a few consecutive
    nodes wait for the same nodes and are in the same state, they become one line."""
    levels = _levels(nodes)
    at = 0
    plain = sorted((node for node in nodes if not node.callback), key=lambda node: levels[node.name])
    while at < len(plain):
        node = plain[at]
        alike = [node]
        for other in plain[at + 1 :]:
            if _sort(other, levels) != _sort(node, levels):
                break
            alike.append(other)
        if len(alike) <= _ALIKE_MAX:
            alike = [node]
        at += len(alike)
        indent = "  " * levels[node.name] + ("└ " if levels[node.name] else "")
        more = f" … {alike[-1].name} ({len(alike):,} nodes)" if len(alike) > 1 else ""
        yield [f"{indent}{_title(node)}{more}", _node_state(node), _after(node), "" if more else node.job_id]
    for node in nodes:
        if node.callback:
            yield [_title(node), _node_state(node), "", node.job_id]


def _title(node: workflows_pb2.NodeInfo) -> str:
    """Returns a node's name. If the node is a callback or waits for a signal, the text says so before the name."""
    what = _callback(node) or ("signal" if node.signal else None)
    return node.name if what is None else f"{what}: {node.name}"


def _sort(node: workflows_pb2.NodeInfo, levels: Mapping[str, int]) -> tuple[object, ...]:
    return levels[node.name], node.state, node.signal, [(edge.node, edge.on_failed) for edge in node.after]


def _after(node: workflows_pb2.NodeInfo) -> str:
    edges = list(node.after)
    shown = [edge.node + ("" if _policy(edge) == "cancel" else f" ({_policy(edge)})") for edge in edges[:_ALIKE_MAX]]
    more = f", … ({len(edges):,})" if len(edges) > _ALIKE_MAX else ""
    return ", ".join(shown) + more


def _mermaid(nodes: Sequence[workflows_pb2.NodeInfo]) -> Iterator[str]:
    numbers = {node.name: node.number for node in nodes}
    yield "flowchart TD"
    for node in nodes:
        label = f"{_mermaid_text(_title(node))}<br/>{_node_state(node)}"
        shape = f'(["{label}"])' if node.callback else f'{{{{"{label}"}}}}' if node.signal else f'["{label}"]'
        yield f"    n{node.number}{shape}"
    for node in nodes:
        for edge in node.after:
            policy = _policy(edge)
            arrow = "-->" if policy == "cancel" else f"-. {policy} .->"
            yield f"    n{numbers[edge.node]} {arrow} n{node.number}"


def _mermaid_text(name: str) -> str:
    """Escapes what Mermaid would read as its own syntax or as HTML. Callers choose the names of nodes."""
    return "".join(f"#{ord(sign)};" if sign in _MERMAID_SIGNS else sign for sign in name)


def _dot(nodes: Sequence[workflows_pb2.NodeInfo]) -> Iterator[str]:
    numbers = {node.name: node.number for node in nodes}
    yield "digraph workflow {"
    for node in nodes:
        label = json.dumps(f"{_title(node)}\n{_node_state(node)}", ensure_ascii=False)
        shape = "ellipse" if node.callback else "hexagon" if node.signal else "box"
        yield f"    n{node.number} [label={label}, shape={shape}];"
    for node in nodes:
        for edge in node.after:
            policy = _policy(edge)
            style = "" if policy == "cancel" else f' [label="{policy}", style=dashed]'
            yield f"    n{numbers[edge.node]} -> n{node.number}{style};"
    yield "}"
