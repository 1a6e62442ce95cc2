"""Keeps a router process below its memory limit, whatever its clients send.

The memory of calls is reserved in the buffer (router/buffer.py). The buffer does not see incomplete requests: gRPC
keeps the bytes of each, up to the largest message size, without reporting them. So this module compares the bytes that
a connection's socket has received with those that have certainly left the incomplete requests
(router/gate/arrivals.py); the difference is what the connection may hold in incomplete requests. While the process is
above its limit, the connections that hold most are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping

from router.gate import connections
from router.gate.admission import Gate

_log = logging.getLogger(__name__)

_MIB = 1024 * 1024
# The pause between two looks at the memory. While the process is above half of its limit, it looks more often. Then
# only little can arrive between two looks, for example 25 MiB on loopback.
_LOOK_S = 0.25
_QUICK_LOOK_S = 0.025
# How long it takes until closed connections have given back their memory.
_CLOSE_S = 0.25
# If a look finds no connection to close, the process may keep its size for this long: the memory is in use, or freed
# but kept by the allocator.
_REST_S = 2.0
# During _CLOSE_S and _REST_S, the process looks for connections to close only if its memory has grown by more than
# this.
_GROWTH_BYTES = 8 * _MIB
# A connection that holds less than this is not closed: it may hold only a message on its way, or frames that are not
# counted.
_BLAMED_BYTES = _MIB
# After this many messages the connections are listed, to correct the count of the bytes that the process does not hold
# in incomplete messages. That count falls behind by about 100 bytes for each message.
_LIST_EVERY = 10_000
# The longest time after a listing until gRPC has handed over every call that the connections had at the listing.
_HANDED_OVER_S = 1.0
# Freed memory is given back to the system if the process has grown by this much since its start, at most once in
# `_TRIM_S`.
_TRIM_BYTES = 64 * _MIB
_TRIM_S = 10.0
_LOG_S = 60.0
# File descriptors reserved for this module, so that it still works when clients have opened as many connections as the
# process may have files.
_SPARE_FILES = 4
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """`run` checks the memory, and closes the connections that were passed to `hang_up`. `resident` returns the
    resident memory of the process in bytes."""

    def __init__(self, limit_bytes: int, resident: Callable[[], int] | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._resident = resident or _resident()
        self._to_hang_up: set[str] = set()
        self._wake = asyncio.Event()
        self._trim_again_s = 0.0
        self._first_bytes = self._resident()
        # The size of the process when it last looked for connections to close. It may keep this size until
        # `_accepted_until_s`.
        self._accepted_bytes = 0
        self._accepted_until_s = 0.0
        self._log_again_s = 0.0
        # The connections are listed after `_list_at` messages, or when the number of counted connections exceeds
        # `_forget_at`.
        self._list_at = _LIST_EVERY
        self._forget_at = 1000
        # How many bytes each connection had received at a listing. None: these numbers were passed to the gate's
        # arrivals, or there was no listing yet.
        self._listed: Mapping[str, int] | None = None
        self._handed_over_s = 0.0
        self._spare = _spare_files()

    def hang_up(self, peer: str) -> None:
        """Closes the connection of a peer soon after this call."""
        self._to_hang_up.add(peer)
        self._wake.set()

    async def run(self, gate: Gate, port: int) -> None:
        """Checks the memory until cancelled. `port` is the one that clients connect to."""
        while True:
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            peers, self._to_hang_up = self._to_hang_up, set()
            try:
                await self._look(gate, port, peers)
            except (OSError, RuntimeError) as error:
                # Most likely this process cannot open more files, or start a thread. Try again until it can.
                self._to_hang_up |= peers
                self._log("could not look at the connections: %s", error)

    def _pause_s(self) -> float:
        return _QUICK_LOOK_S if self._resident() > self._limit_bytes // 2 else _LOOK_S

    async def _look(self, gate: Gate, port: int, peers: Collection[str]) -> None:
        """Closes the connections of these peers, and others if the process is above its limit."""
        now_s = asyncio.get_running_loop().time()
        if peers:
            # Do this before the trim, which takes long in a large process: these peers would continue to send
            # meanwhile.
            await self._with_spare_files(asyncio.to_thread(connections.hang_up, port, peers))
        await self._trim(now_s)
        if self._listed is not None and now_s >= self._handed_over_s:
            gate.arrivals.catch_up(self._listed)
            self._listed = None
        too_large = self._excess(now_s) > 0
        stale = gate.arrivals.count >= self._list_at or len(gate.arrivals.done) > self._forget_at
        if too_large:
            await self._with_spare_files(self._shrink(gate, port, now_s))
        elif stale:
            await self._with_spare_files(self._list(gate, port))

    async def _with_spare_files(self, work: Awaitable[object]) -> None:
        """Does work that needs file descriptors, even if clients have taken all others."""
        for number in self._spare:
            os.close(number)
        self._spare = []
        try:
            await work
        finally:
            self._spare = _spare_files()

    def _excess(self, now_s: float) -> int:
        """Returns by how many bytes the process is too large; 0 or less if it is not."""
        resident = self._resident()
        if now_s >= self._accepted_until_s:
            return resident - self._limit_bytes
        grown = resident - max(self._accepted_bytes, self._limit_bytes)
        return grown if grown > _GROWTH_BYTES else 0

    async def _trim(self, now_s: float) -> None:
        resident = self._resident()
        above = resident > self._limit_bytes
        if now_s >= self._trim_again_s and (above or resident > self._first_bytes + _TRIM_BYTES):
            await asyncio.to_thread(_give_back_freed)
            above = self._resident() > self._limit_bytes
            self._trim_again_s = now_s + (_REST_S if above else _TRIM_S)

    async def _shrink(self, gate: Gate, port: int, now_s: float) -> None:
        """Closes the connections that hold most."""
        received = await self._list(gate, port)
        held = {peer: count - gate.arrivals.done[peer] for peer, count in received.items()}
        resident, excess = self._resident(), self._excess(now_s)
        blamed: set[str] = set()
        for peer in sorted(held, key=held.__getitem__, reverse=True):
            if excess <= 0 or held[peer] < _BLAMED_BYTES:
                break
            blamed.add(peer)
            excess -= held[peer]
        if blamed:
            await asyncio.to_thread(connections.hang_up, port, blamed)
        self._accepted_bytes = resident
        self._accepted_until_s = now_s + (_CLOSE_S if blamed else _REST_S)
        self._log(
            "this process uses %d MiB of memory, and its limit is %d MiB: %s",
            resident // _MIB,
            self._limit_bytes // _MIB,
            f"closed {len(blamed)} connection(s) with unfinished requests of "
            f"{sum(held[peer] for peer in blamed) // _MIB} MiB"
            if blamed
            else f"no connection has unfinished requests; calls hold {gate.buffer.held // _MIB} MiB",
        )

    def _log(self, message: str, *values: object) -> None:
        """Logs a warning, at most once a minute."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._log_again_s:
            self._log_again_s = now_s + _LOG_S
            _log.warning(message, *values)

    async def _list(self, gate: Gate, port: int) -> Mapping[str, int]:
        """Returns how many bytes each connection has received so far."""
        received = await asyncio.to_thread(connections.received_bytes, port)
        gate.arrivals.forget(received.keys())
        if self._listed is None:
            self._listed = received
            self._handed_over_s = asyncio.get_running_loop().time() + _HANDED_OVER_S
        self._list_at = gate.arrivals.count + _LIST_EVERY
        self._forget_at = 1000 + 2 * len(gate.arrivals.done)
        return received


def _spare_files() -> list[int]:
    """Opens the descriptors that are held in reserve, or fewer if the process cannot open more."""
    spare: list[int] = []
    with contextlib.suppress(OSError):
        while len(spare) < _SPARE_FILES:
            spare.append(os.open(os.devnull, os.O_RDONLY))
    return spare


def _resident() -> Callable[[], int]:
    """Returns a function that returns the resident memory of this process. That function opens no file: it is called
    often, and the process may have no descriptor left."""
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    return lambda: int(os.pread(statm, 100, 0).split()[1]) * _PAGE_BYTES


def _give_back_freed() -> None:
    """Gives freed memory back to the system, if the C library has a function for that. Without the call, glibc keeps
    the memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
