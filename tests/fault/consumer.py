"""A consumer process that tests kill: it leases jobs, logs each lease, acks the job, and logs the answer.

    python -m tests.fault.consumer ADDRESS LOG WORKER ORG...

The log has one JSON object per line: {"leased": id, "attempt": n, "lease": hex} or {"acked": id, "answer": n}. The
process ends after SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration

from windrow.v1 import queue_pb2, queue_pb2_grpc

QUEUE = "load"
WINDOW_S = 2
_Answer = TypeVar("_Answer")


def main(address: str, log: Path, worker: str, orgs: list[str]) -> None:
    stopped = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)

    def until_answered(call: Callable[[], _Answer]) -> _Answer:
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise
                time.sleep(0.1)

    options = [("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
    # Line-buffered: lines that were written before a kill -9 are in the file.
    with log.open("a", buffering=1) as lines, grpc.insecure_channel(address, options=options) as channel:
        queue = queue_pb2_grpc.QueueStub(channel)
        while not stopped:
            found = False
            for org in orgs:
                request = queue_pb2.DequeueRequest(
                    org=org, queues=[QUEUE], max_jobs=20, visibility_window=Duration(seconds=WINDOW_S), worker=worker
                )
                try:
                    jobs = queue.Dequeue(request, timeout=5).jobs
                except grpc.RpcError:
                    continue
                for job in jobs:
                    lines.write(json.dumps({"leased": job.id, "attempt": job.attempt, "lease": job.lease.hex()}) + "\n")
                if not jobs:
                    continue
                found = True
                acks = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=job.lease) for job in jobs])
                answers = until_answered(lambda: queue.Ack(acks, timeout=5)).answers  # noqa: B023
                for job, answer in zip(jobs, answers, strict=True):
                    lines.write(json.dumps({"acked": job.id, "answer": answer}) + "\n")
            if not found:
                time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
