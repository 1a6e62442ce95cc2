"""The scrape endpoint of a router: one address for all its processes, in the supervisor.

Each process writes its metrics (shard/metrics.py) into files of one folder, with prometheus_client's multiprocess mode.
Each count is in the files at once, so that nothing is lost when a process is killed. The files of processes that have
ended are added up in one file, so that the sums never go backwards and restarts do not fill the folder. This module
knows no metric by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Exemplar

from router.errors import CannotServeMetrics
from router.process import scrape_server
from router.settings import host_and_port

_log = logging.getLogger(__name__)

# This folder is in memory, and is used if it exists: then nothing is written to a disk, and no cleaner of temporary
# folders deletes files that look old.
_MEMORY = Path("/dev/shm")
_PREFIX = "windrow-metrics-"


class Metrics:
    """The metrics that all router processes write into files in `folder`. `environ`: the variables that must be in the
    environment of a router process."""

    def __init__(self, folder: Path) -> None:
        self.environ = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
        self._folder = folder
        # A scrape must not see a process's figures both in its own file and in the sum.
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Returns the figures of all processes, added up. The server calls this, in threads of its own."""
        with self._lock:
            added_up = list(MultiProcessCollector(None, path=str(self._folder)).collect())  # type: ignore[no-untyped-call]
            self._add_exemplars(added_up)
        return [*added_up, *self._written_at_once()]

    def _add_exemplars(self, metrics: Iterable[Metric]) -> None:
        """Adds to each sample the newest exemplar that a process has written for it (router/gate/exemplars.py)."""
        newest: dict[tuple[str, frozenset[tuple[str, str]]], Exemplar] = {}
        for file in self._folder.glob("exemplars_*.json"):
            for name, labels, trace_id, value, at_s in json.loads(file.read_text()):
                series = name, frozenset(labels.items())
                if series not in newest or newest[series].timestamp < at_s:
                    newest[series] = Exemplar({"trace_id": trace_id}, value, at_s)
        # A scrape has thousands of samples: skip them if there are no exemplars, as without tracing.
        for metric in metrics if newest else ():
            metric.samples = [
                sample._replace(exemplar=newest.get((sample.name, frozenset(sample.labels.items()))))
                for sample in metric.samples
            ]

    def _written_at_once(self) -> Iterable[Metric]:
        """Returns the gauges that are written as whole files (router/fleet/shard_gauges.py). Leaves out files that no
        process has replaced in time."""
        gauges: dict[str, GaugeMetricFamily] = {}
        for file in self._folder.glob("shard_*.json"):
            written = json.loads(file.read_text())
            if time.time() < written["until"]:
                for name, meaning, labels, samples in written["families"]:
                    gauge = gauges.setdefault(name, GaugeMetricFamily(name, meaning, labels=labels))
                    for values, value in samples:
                        gauge.add_metric(values, value)
        return gauges.values()

    def ended(self, pid: int) -> None:
        """Call this when a router process has ended. Keeps what the process has counted, and drops its gauges and
        exemplars. If that fails, the files of the process stay, and are read as before."""
        try:
            with self._lock:
                for pattern in (f"gauge_*_{pid}.db", f"exemplars_{pid}.json"):
                    for file in self._folder.glob(pattern):
                        file.unlink()
                for kind in ("counter", "histogram"):
                    own = self._folder / f"{kind}_{pid}.db"
                    if own.exists():
                        self._add(own, self._folder / f"{kind}_ended.db")
        except OSError as error:
            _log.warning("could not add up the metrics of process %d: %s", pid, error.strerror)
        except Exception:  # noqa: BLE001 - whatever it is, the router processes must go on
            _log.exception("could not add up the metrics of process %d", pid)

    def _add(self, own: Path, total: Path) -> None:
        """Adds the values of the file `own` to the file `total`, in a new file, which then replaces both."""
        if not own.stat().st_size:
            # The process was killed just after it had created the file. No scrape can read an empty file.
            own.unlink()
            return
        new = total.with_suffix(".new")
        new.unlink(missing_ok=True)
        with contextlib.closing(MmapedDict(str(new))) as sums:  # type: ignore[no-untyped-call]
            for part in (own, total):
                if part.exists():
                    for key, value, _, _ in MmapedDict.read_all_values_from_file(str(part)):  # type: ignore[no-untyped-call]
                        sums.write_value(key, sums.read_value(key)[0] + value, 0.0)  # type: ignore[no-untyped-call]
        new.replace(total)
        own.unlink()


@contextlib.contextmanager
def _folder() -> Generator[Path, None, None]:
    """Makes a folder, which is deleted at the end. Also deletes the folders of supervisors that were killed: otherwise
    these folders would fill the memory. A supervisor holds the lock of its folder for as long as it lives."""
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*"):
        if (lock := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    # Until the new folder is locked, another supervisor may think that the folder's owner was killed, and delete the
    # folder. If that happens, make another folder.
    while (lock := _locked(folder := Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place)))) is None:
        pass
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """Returns a descriptor that holds the lock of the folder until it is closed. None: another process has the lock, or
    the folder belongs to another user, was deleted, or is no folder."""
    try:
        # Any user may put anything into this place. An open() of a pipe would wait for ever, so open only folders.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def served(address: str) -> Generator[Metrics, None, None]:
    """Serves the figures at http://ADDRESS/metrics within this scope, in a thread. Port 0 chooses a free port, which
    the log names. Raises CannotServeMetrics."""
    host, port = host_and_port(address, where="metrics")
    with _folder() as folder:
        metrics = Metrics(folder)
        registry = CollectorRegistry()
        registry.register(metrics)
        try:
            server, thread = scrape_server.start(host.strip("[]"), port, registry)
        except OSError as error:
            raise CannotServeMetrics(
                f"cannot serve metrics on {address}: {error.strerror}; choose another address for them"
            ) from error
        try:
            _log.info("metrics are at http://%s:%d/metrics", host, server.server_port)
            yield metrics
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
