"""The connection to one sibling process: frames in both directions, at most one for each iteration of the event
loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import cast

from router.fleet.siblings.frame import FRAME_BYTES_MAX, SIZES, Frame, decoded, greeted_by, greeting

_log = logging.getLogger(__name__)


class Link(asyncio.Protocol):
    """The connection to a sibling. `out` collects what the sibling is to be told, and `send_soon` sends it. `on_open`
    is called when the sibling has sent its greeting, and `on_frame` with each frame. `on_closed` is called when the
    connection has ended: the sibling is gone, is of another release, or sent something that is not a frame."""

    def __init__(
        self,
        *,
        version: str,
        on_open: Callable[[], None],
        on_frame: Callable[[Frame], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.out = Frame()
        self.is_open = False
        # Whether the sibling does not read now. If so, messages to the sibling wait in `out`, and not in the transport.
        self.is_paused = False
        self._version = version
        self._on_open = on_open
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._received = bytearray()
        self._sending = False

    def send_soon(self) -> None:
        """Sends what is in `out` in the next iteration of the event loop, together with what is added until then."""
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    def greet(self) -> None:
        """Call this after the connection was made, and not in connection_made. If a write in connection_made fails
        because the sibling has just ended, uvloop 0.23 closes the descriptor twice. The second time, the descriptor may
        belong to another file already."""
        if not self._closed:
            assert self._transport is not None
            self._transport.write(greeting(self._version))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self) -> None:
        self._sending = False
        if not self.is_open or self.is_paused or not self.out:
            return
        assert self._transport is not None
        self._transport.write(self.out.take().encoded())
        if self.out:
            self.send_soon()

    # ── Called by the event loop ─────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not derived from asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            for head, jobs in self._frames():
                if self.is_open:
                    self._on_frame(decoded(head, jobs))
                else:
                    self._greeted(head)
        except ValueError as error:
            self._end(f"sent what is no frame: {error}")

    def _frames(self) -> Iterator[tuple[bytes, bytes]]:
        while not self._closed and len(self._received) >= SIZES.size:
            in_head, in_jobs = SIZES.unpack_from(self._received)
            head_end = SIZES.size + in_head
            end = head_end + in_jobs
            if end > FRAME_BYTES_MAX:
                raise ValueError(f"it would have {end:,} bytes")
            if len(self._received) < end:
                return
            head, jobs = bytes(self._received[SIZES.size : head_end]), bytes(self._received[head_end:end])
            del self._received[:end]
            yield head, jobs

    def _greeted(self, head: bytes) -> None:
        version = greeted_by(head)
        if version != self._version:
            self._end(f"is of release {version}, and this one of {self._version}")
            return
        self.is_open = True
        self._on_open()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.send_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close()

    def _end(self, why: str) -> None:
        _log.warning("jobs are not handed over to another process of this router any more, nor by it: it %s", why)
        assert self._transport is not None
        self._transport.abort()
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.is_open = False
            self._received.clear()
            self._on_closed()
