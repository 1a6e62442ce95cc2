"""Compares workflows with a model. The graphs are random, and their nodes end in any order that Hypothesis generates,
through two routers. After every act, the nodes that run are exactly the nodes that the model names. No sweep runs, so
nothing repairs a workflow. There is one exception: if the portions of a fold have at most two jobs, sweeps do the rest
of the fold."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from shard.errors import NotSignalled
from shard.postgres.pool import Database
from shard.vocabulary import Alteration, Answer, Lease, OrgId
from shard.workflow import AddedNodes, Callback, NewWorkflow, NodeName, OnFailed
from tests.conftest import SHARD
from tests.effort import trials
from tests.workflows import Flows, set_portion

T = TypeVar("T")
NODES_MAX = trials(8, thorough=20)
CALLBACKS = {"won": Callback.SUCCESS, "lost": Callback.FAILURE, "over": Callback.END}
_numbers = itertools.count()

Edges = dict[str, dict[str, OnFailed]]


@st.composite
def graphs(draw: st.DrawFn) -> Edges:
    count = draw(st.integers(1, NODES_MAX))
    policies = st.sampled_from(OnFailed)
    return {
        f"n{node}": {f"n{parent}": draw(policies) for parent in range(node) if draw(st.integers(0, 2)) == 0}
        for node in range(count)
    }


@dataclass(kw_only=True)
class Model:
    """The expected state of a workflow."""

    # The edges of each node. A node comes after its parents.
    edges: Edges
    # For each node that has ended: how it ended.
    ended: dict[str, str] = field(default_factory=dict[str, str])
    # Nodes whose jobs are live and wait for no other node.
    free: set[str] = field(default_factory=set[str])
    # `signals`: the nodes that wait for signals. `signalled`: the nodes that have got a signal.
    signals: set[str] = field(default_factory=set[str])
    signalled: set[str] = field(default_factory=set[str])
    cancelled: bool = False
    # A paused workflow frees no nodes, and no callbacks.
    paused: bool = False

    def settle(self) -> None:
        """Ends and frees all nodes that must end or be freed because of the nodes that have ended. Repeats this until
        nothing changes."""
        changed = True
        while changed:
            changed = False
            for node, parents in self.edges.items():
                if node in self.ended or node in self.free:
                    continue
                doomed = any(
                    self.ended.get(parent) in ("failed", "cancelled") and policy is OnFailed.CANCEL
                    for parent, policy in parents.items()
                )
                if doomed or self.cancelled:
                    self.ended[node] = "cancelled"
                    changed = True
                elif not self.paused and all(parent in self.ended for parent in parents):
                    if node in self.signalled:
                        self.ended[node] = "succeeded"
                    else:
                        self.free.add(node)
                    changed = True

    @property
    def running(self) -> set[str]:
        """The nodes whose jobs a worker gets."""
        return self.free - self.signals

    def signal(self, node: str) -> None:
        self.signalled.add(node)
        if node in self.free:
            self.end(node, "succeeded")

    def end(self, node: str, how: str) -> None:
        self.free.discard(node)
        self.ended[node] = how
        self.settle()

    @property
    def state(self) -> str:
        if len(self.ended) < len(self.edges):
            return "running"
        if self.cancelled:
            return "cancelled"
        for node, how in self.ended.items():
            after = [parents[node] for parents in self.edges.values() if node in parents]
            if how in ("failed", "cancelled") and not (after and all(policy is OnFailed.IGNORE for policy in after)):
                return "failed"
        return "succeeded"


class WorkflowsMachine(RuleBasedStateMachine):
    runner: ClassVar[asyncio.Runner]
    database: ClassVar[Database]
    # Whether folds work in small portions.
    portions: ClassVar[bool]

    @initialize(edges=graphs(), marks=st.sets(st.integers(0, NODES_MAX - 1), max_size=3))
    def begin(self, edges: Edges, marks: set[int]) -> None:
        org = OrgId(f"workflows-model-{next(_numbers)}")
        self.routers = [Flows(self.database, org) for _ in range(2)]
        self.model = Model(edges=edges, signals={f"n{mark}" for mark in marks} & edges.keys())
        self.model.settle()
        graph = {node: list(parents.items()) for node, parents in edges.items()}
        self.flow: NewWorkflow = self.do(
            self.routers[0].start(graph, callbacks=CALLBACKS, signals=sorted(self.model.signals))
        )
        self.routers[1].know(self.flow)
        self.callbacks: set[str] = set()
        # For each node: the graph that the node added in its latest call.
        self.added: dict[str, Edges] = {}
        # For each node: the last graph for which it has waited, with the policy of that wait.
        self.waited: dict[str, tuple[Edges, OnFailed]] = {}
        self.compare()

    def teardown(self) -> None:
        # A check reads all workflows of the shard. Without the TRUNCATE, checks would take longer with each example.
        of_workflows = b"windrow.workflow, windrow.workflow_node, windrow.workflow_edge, windrow.workflow_arrival"
        self.do(self.database.run(b"TRUNCATE windrow.job, " + of_workflows, {}))

    def do(self, act: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(act)

    def compare(self) -> None:
        """Claims the ready jobs, and compares everything with the model."""
        first = self.routers[0]
        if self.portions:
            self.do(first.check())
            self.do(self.routers[1].sweep.sweep())
        taken = self.do(first.claim())
        self.callbacks |= taken & CALLBACKS.keys()
        assert first.leases.keys() - CALLBACKS.keys() == self.model.running
        states = self.do(first.states(self.flow))
        told = {node: state for node, state in states.items() if node not in CALLBACKS}
        assert {node for node, state in told.items() if state == "released"} == self.model.free
        assert {node: state for node, state in told.items() if state not in ("released", "blocked")} == self.model.ended
        state = self.do(first.state(self.flow))
        assert state == self.model.state
        expected = {
            "running": set[str](),
            "succeeded": {"won", "over"},
            "failed": {"lost", "over"},
            "cancelled": {"over"},
        }
        assert self.callbacks == (set() if self.model.paused else expected[state])
        self.do(first.check())

    @rule(
        number=st.integers(0, 99),
        how=st.sampled_from(("ack", "ack", "ack", "kill", "cancel", "skip")),
        router=st.integers(0, 1),
    )
    def end(self, number: int, how: str, router: int) -> None:
        live = sorted(self.model.running)
        if not live:
            return
        node = live[number % len(live)]
        flows, other = self.routers[router], self.routers[0]
        lease = other.leases[node]
        if how in ("ack", "kill"):
            flows.leases[node] = lease
            self.do(flows.ack(node) if how == "ack" else flows.kill(node))
        elif how == "cancel":
            self.do(flows.cancel(self.flow, node))
        else:
            job = self.do(flows.admin.skip(flows.org, self.flow.id, NodeName(node), epoch=1))
            self.do(flows.store.cancel(flows.org, [job], reason="skipped"))
        other.leases.pop(node, None)
        self.model.end(node, {"ack": "succeeded", "kill": "failed", "cancel": "cancelled", "skip": "skipped"}[how])
        self.compare()

    @rule(number=st.integers(0, 99), how=st.sampled_from(("cancel", "skip")))
    def end_blocked(self, number: int, how: str) -> None:
        blocked = [node for node in self.model.edges if node not in self.model.ended and node not in self.model.free]
        if not blocked:
            return
        node = blocked[number % len(blocked)]
        flows = self.routers[1]
        if how == "cancel":
            self.do(flows.cancel(self.flow, node))
        else:
            job = self.do(flows.admin.skip(flows.org, self.flow.id, NodeName(node), epoch=1))
            self.do(flows.store.cancel(flows.org, [job], reason="skipped"))
        self.model.end(node, "cancelled" if how == "cancel" else "skipped")
        self.compare()

    @rule(number=st.integers(0, 99), router=st.integers(0, 1))
    def signal(self, number: int, router: int) -> None:
        """Gives a signal before its node waits for it, in time, or again. A signal that comes too late is refused."""
        if not self.model.signals:
            return
        node = sorted(self.model.signals)[number % len(self.model.signals)]
        is_first = node not in self.model.signalled
        if node in self.model.ended and self.model.ended[node] != "succeeded":
            with pytest.raises(NotSignalled):
                self.do(self.routers[router].signal(self.flow, node))
        else:
            assert self.do(self.routers[router].signal(self.flow, node)) is is_first
            self.model.signal(node)
        self.compare()

    @rule(number=st.integers(0, 99), how=st.sampled_from(("cancel", "skip", "time")))
    def end_waiting(self, number: int, how: str) -> None:
        """Ends a node that waits for its signal, in another way."""
        waiting = sorted(self.model.free & self.model.signals)
        if not waiting:
            return
        node = waiting[number % len(waiting)]
        flows = self.routers[1]
        if how == "cancel":
            self.do(flows.cancel(self.flow, node))
        elif how == "skip":
            job = self.do(flows.admin.skip(flows.org, self.flow.id, NodeName(node), epoch=1))
            self.do(flows.store.cancel(flows.org, [job], reason="skipped"))
        else:
            job = flows.job(self.flow, node)
            assert self.do(flows.store.alter(flows.org, [job], Alteration(delay_us=0))) == [Answer.OK]
            self.routers[0].leases |= self.do(self.leased_by(flows))
        self.model.end(node, "skipped" if how == "skip" else "cancelled")
        self.compare()

    async def leased_by(self, flows: Flows) -> dict[str, Lease]:
        """Claims through the other router."""
        self.callbacks |= await flows.claim() & CALLBACKS.keys()
        leases, flows.leases = flows.leases, {}
        return leases

    @rule(number=st.integers(0, 99), router=st.integers(0, 1), graph=graphs(), draw=st.data())
    def add(self, number: int, router: int, graph: Edges, draw: st.DataObject) -> None:
        """Adds a graph. Each of its nodes may also wait for nodes that the workflow had before."""
        live = sorted(self.model.running)
        if not live:
            return
        adder, size = live[number % len(live)], len(self.model.edges)
        policies = st.dictionaries(st.sampled_from(sorted(self.model.edges)), st.sampled_from(OnFailed), max_size=3)
        new = {
            f"m{size}-{node}": {f"m{size}-{parent}": policy for parent, policy in parents.items()} | draw.draw(policies)
            for node, parents in graph.items()
        }
        self.send(router, adder, new)
        self.model.edges |= new
        self.model.settle()
        self.added[adder] = new
        self.compare()

    @rule(number=st.integers(0, 99), router=st.integers(0, 1))
    def add_again(self, number: int, router: int) -> None:
        """A repeated call adds nothing."""
        adders = sorted(self.added.keys() & self.model.running)
        if adders:
            adder = adders[number % len(adders)]
            assert self.send(router, adder, self.added[adder]).stored == 0
            self.compare()

    @rule(number=st.integers(0, 99), router=st.integers(0, 1), graph=graphs(), draw=st.data())
    def wait(self, number: int, router: int, graph: Edges, draw: st.DataObject) -> None:
        """Adds a graph for which the job waits. Each of its nodes may also wait for nodes that have ended."""
        live = sorted(self.model.running)
        if not live:
            return
        adder, size = live[number % len(live)], len(self.model.edges)
        policy = draw.draw(st.sampled_from(OnFailed))
        ended = st.just(dict[str, OnFailed]())
        if self.model.ended:
            ended = st.dictionaries(st.sampled_from(sorted(self.model.ended)), st.sampled_from(OnFailed), max_size=3)
        new = {
            f"m{size}-{node}": {f"m{size}-{parent}": policy for parent, policy in parents.items()} | draw.draw(ended)
            for node, parents in graph.items()
        }
        assert self.send(router, adder, new, wait=policy).waits
        del self.routers[0].leases[adder]
        self.model.free.discard(adder)
        self.model.edges |= new
        self.model.edges[adder] = self.model.edges[adder] | dict.fromkeys(new, policy)
        self.model.settle()
        self.waited[adder] = (new, policy)
        self.compare()

    @rule(number=st.integers(0, 99), router=st.integers(0, 1))
    def wait_again(self, number: int, router: int) -> None:
        """A job that runs again finds that the nodes have ended, and continues."""
        adders = sorted(self.waited.keys() & self.model.running)
        if adders:
            adder = adders[number % len(adders)]
            new, policy = self.waited[adder]
            added = self.send(router, adder, new, wait=policy)
            assert (added.stored, added.waits) == (0, False)
            self.compare()

    def send(self, router: int, adder: str, new: Edges, *, wait: OnFailed | None = None) -> AddedNodes:
        flows, other = self.routers[router], self.routers[0]
        graph = {node: list(parents.items()) for node, parents in new.items()}
        added = self.do(flows.add(self.flow, other.leases[adder], graph, wait=wait))
        for one in self.routers:
            one.names |= flows.names
            one.added |= flows.added
        return added

    @rule()
    def end_all_at_once(self) -> None:
        nodes = sorted(self.model.running)
        if nodes:
            self.do(self.routers[0].ack(*nodes))
            for node in nodes:
                self.model.free.discard(node)
                self.model.ended[node] = "succeeded"
            self.model.settle()
            self.compare()

    @rule(number=st.integers(0, 99))
    def redrive(self, number: int) -> None:
        """A job that runs again after its end changes nothing."""
        dead = sorted(node for node, how in self.model.ended.items() if how == "failed")
        if dead:
            flows = self.routers[1]
            node = dead[number % len(dead)]
            answers = self.do(flows.store.redrive(flows.org, [flows.job(self.flow, node)]))
            if answers == [Answer.OK]:
                assert node in self.do(flows.claim())
                self.routers[0].leases |= {name: flows.leases.pop(name) for name in list(flows.leases) if name != node}
                self.do(flows.ack(node))
            self.compare()

    @rule(router=st.integers(0, 1))
    def pause_or_resume(self, router: int) -> None:
        """A workflow that has ended is not paused any more."""
        if self.model.state != "running" and not self.model.paused:
            return
        flows = self.routers[router]
        self.model.paused = not self.model.paused
        self.do(flows.admin.set_paused(flows.org, self.flow.id, paused=self.model.paused, epoch=1))
        self.model.settle()
        self.compare()

    @rule(number=st.integers(0, 5))
    def cancel_all(self, number: int) -> None:
        """Cancels the workflow. This happens rarely, because it ends the whole example."""
        if number or self.model.state != "running":
            return
        flows = self.routers[1]
        jobs = self.do(flows.admin.doom(flows.org, self.flow.id, reason="", epoch=1))
        assert sorted(jobs) == sorted(flows.job(self.flow, node) for node in self.model.free)
        self.model.cancelled, self.model.paused = True, False
        if jobs:
            self.do(flows.store.cancel(flows.org, jobs, reason="cancelled"))
        for node in self.model.free:
            self.model.ended[node] = "cancelled"
        self.model.free.clear()
        self.model.settle()
        self.routers[0].leases = {name: lease for name, lease in self.routers[0].leases.items() if name in CALLBACKS}
        self.compare()


@pytest.fixture(params=[False, True], ids=["whole", "in portions"])
def machine(module_dsn: str, request: pytest.FixtureRequest) -> Iterator[type[WorkflowsMachine]]:
    database = Database(SHARD, module_dsn, connections=2)
    with asyncio.Runner() as runner:
        runner.run(database.open())
        WorkflowsMachine.runner, WorkflowsMachine.database = runner, database
        WorkflowsMachine.portions = request.param
        runner.run(set_portion(database, 2 if request.param else 200))
        yield WorkflowsMachine
        runner.run(database.close())


@pytest.mark.thorough
def test_a_workflow_does_what_the_model_says(machine: type[WorkflowsMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=trials(40, thorough=1500),
            stateful_step_count=12,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
        ),
    )
