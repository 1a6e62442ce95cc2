"""A fake benchmark peer: queues in memory, in a process of its own. Fails when its arguments or a payload say so."""

from __future__ import annotations

import asyncio
import os
from collections import deque

from bench.peers.python.serve import Report, serve


class Peer:
    async def open(self, dsn: str, connections: int) -> None:
        self._opened = f"{connections} connections to {dsn}"

    async def prepare(self, run: str) -> None:
        if run == "refused":
            raise ValueError(f"no queue, with {self._opened}")
        self._queue: deque[str] = deque()
        self._accepted = self._finished = 0
        self._news = asyncio.Event()
        self._resting = False

    async def enqueue(self, payloads: list[str]) -> None:
        match payloads:
            case ["die"]:
                os._exit(1)
            case ["wait"]:
                await asyncio.Event().wait()
            case _:
                # Some libraries print to standard output; the frames must stay intact.
                print("stored", len(payloads))
                self._queue.extend(payloads)
                self._accepted += len(payloads)
                self._news.set()

    async def work(self, batch: int, concurrency: int, report: Report) -> None:
        self._resting = False
        while not self._resting:
            for _ in range(min(batch * concurrency, len(self._queue))):
                report.taken(self._queue.popleft())
                self._finished += 1
                report.finished(1)
            if not self._queue:
                self._news.clear()
                await self._news.wait()

    def rest(self) -> None:
        self._resting = True
        self._news.set()

    async def counts(self) -> dict[str, int | None]:
        return {"left": len(self._queue), "accepted": self._accepted, "finished": self._finished}

    async def close(self) -> None:
        print("closed")


if __name__ == "__main__":
    serve(Peer())
