"""Exemplars of the durations of calls, as their spans end (router/gate/exemplars.py)."""

from __future__ import annotations

import json
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind

from router.gate.exemplars import Exemplars


def end_a_call(folder: Path) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Exemplars(folder))
    with provider.get_tracer("test").start_as_current_span("windrow.v1.Queue/Ack", kind=SpanKind.SERVER):
        pass


def test_the_end_of_a_call_writes_its_exemplar(tmp_path: Path) -> None:
    end_a_call(tmp_path)
    (file,) = tmp_path.glob("exemplars_*.json")
    ((_, labels, *_),) = json.loads(file.read_text())
    assert labels["method"] == "windrow.v1.Queue/Ack"


def test_a_call_is_answered_although_its_exemplar_cannot_be_written(tmp_path: Path) -> None:
    end_a_call(tmp_path / "missing")
    assert not list(tmp_path.iterdir())
