"""The files with the counters of router processes: what happens to a file after its process has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from router.process.metrics import Metrics

KEY = mmap_key("calls", "calls_total", [], [], "calls")


def count(folder: Path, pid: int, value: float) -> None:
    file = MmapedDict(str(folder / f"counter_{pid}.db"))  # type: ignore[no-untyped-call]
    file.write_value(KEY, value, 0.0)  # type: ignore[no-untyped-call]
    file.close()  # type: ignore[no-untyped-call]


def total(metrics: Metrics) -> float:
    return sum(sample.value for metric in metrics.collect() for sample in metric.samples)


def test_what_ended_processes_have_counted_stays(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    count(tmp_path, 1, 3.0)
    count(tmp_path, 2, 4.0)
    metrics.ended(1)
    metrics.ended(2)
    assert total(metrics) == 7.0


def test_a_process_that_was_killed_before_its_file_had_any_bytes_fails_neither_its_end_nor_a_scrape(
    tmp_path: Path,
) -> None:
    metrics = Metrics(tmp_path)
    count(tmp_path, 1, 3.0)
    (tmp_path / "counter_2.db").touch()
    (tmp_path / "histogram_2.db").touch()
    metrics.ended(2)
    assert total(metrics) == 3.0


def test_a_file_that_cannot_be_read_fails_no_router(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "counter_1.db").write_bytes(b"x")
    Metrics(tmp_path).ended(1)
    assert "could not add up the metrics of process 1" in caplog.text
