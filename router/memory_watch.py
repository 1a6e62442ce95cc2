"""Keeps a router process below its memory limit, whatever its peers send.

What calls hold is reserved (router/buffer.py). What is left are requests whose last byte has not come: gRPC takes their
bytes in, up to the largest message for each, and tells nobody. The socket tells how many bytes a connection has
received, the gate how many of them came as whole messages: the rest is what the connection holds. When the process is
above its limit, the connections that hold most are ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Container
from pathlib import Path

from router import connections
from router.gate import Gate

_log = logging.getLogger(__name__)

_MIB = 1024 * 1024
# Between two looks at the process's memory. What the network brings meanwhile comes on top of the limit.
_LOOK_S = 0.25
# After a look that found nobody to blame. The memory is in use, or was freed and is kept by the allocator.
_REST_S = 2.0
# Whoever holds less is not blamed: it may be a message that is on its way, or frames that are not counted.
_BLAMED_BYTES = _MIB
# How much larger than at its start the process is while freed memory is given back to the system, and how often.
_TRIM_BYTES = 64 * _MIB
_TRIM_S = 10.0
_LOG_S = 60.0
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """`run` looks after the memory, and hangs up peers that it is told to."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._to_hang_up: set[str] = set()
        self._wake = asyncio.Event()
        self._trim_again_s = 0.0
        self._first_bytes = resident_bytes()
        self._log_again_s = 0.0
        self._prune_at = 1000

    def hang_up(self, peer: str) -> None:
        """Has the connection of a peer ended, soon."""
        self._to_hang_up.add(peer)
        self._wake.set()

    async def run(self, gate: Gate, port: int) -> None:
        """Until cancelled."""
        pause_s = _LOOK_S
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._to_hang_up:
                peers, self._to_hang_up = self._to_hang_up, set()
                await asyncio.to_thread(connections.hang_up, port, peers)
            pause_s = await self._look(gate, port)

    async def _look(self, gate: Gate, port: int) -> float:
        """Answers when to look again."""
        loop = asyncio.get_running_loop()
        resident = resident_bytes()
        above = resident > self._limit_bytes
        if loop.time() >= self._trim_again_s and (above or resident > self._first_bytes + _TRIM_BYTES):
            await asyncio.to_thread(_trim)
            resident = resident_bytes()
            above = resident > self._limit_bytes
            self._trim_again_s = loop.time() + (_REST_S if above else _TRIM_S)
        if not above:
            if len(gate.delivered) > self._prune_at:
                self._prune(gate, await asyncio.to_thread(connections.peers, port))
            return _LOOK_S
        received = await asyncio.to_thread(connections.received_bytes, port)
        held = {peer: count - gate.delivered[peer] for peer, count in received.items()}
        self._prune(gate, received.keys())
        excess = resident - self._limit_bytes
        blamed: set[str] = set()
        for peer in sorted(held, key=held.__getitem__, reverse=True):
            if excess <= 0 or held[peer] < _BLAMED_BYTES:
                break
            blamed.add(peer)
            excess -= held[peer]
        if blamed:
            await asyncio.to_thread(connections.hang_up, port, blamed)
        if loop.time() >= self._log_again_s:
            self._log_again_s = loop.time() + _LOG_S
            _log.warning(
                "this process has %d MiB, and its limit is %d MiB: %s",
                resident // _MIB,
                self._limit_bytes // _MIB,
                f"ended {len(blamed)} connection(s) with unfinished requests of "
                f"{sum(held[peer] for peer in blamed) // _MIB} MiB"
                if blamed
                else f"no connection has unfinished requests; calls hold {gate.buffer.held // _MIB} MiB",
            )
        return _LOOK_S if blamed else _REST_S

    def _prune(self, gate: Gate, connected: Container[str]) -> None:
        """Forgets peers that are gone."""
        for peer in [peer for peer in gate.delivered if peer not in connected]:
            del gate.delivered[peer]
        self._prune_at = 1000 + 2 * len(gate.delivered)


def resident_bytes() -> int:
    """The memory that this process has."""
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


def _trim() -> None:
    """Gives freed memory back to the system, where the C library can: glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
