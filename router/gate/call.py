"""The calls and streams that a router process serves, and the one that the current task serves."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from router.buffer import Account, Buffer

if TYPE_CHECKING:
    from router.gate.auth.principal import Principal

_CALL: ContextVar[Call] = ContextVar("call")


class Call(Account):
    """One call or stream, with its account in the buffer."""

    __slots__ = ("caller_counted", "counted", "principal", "round")

    def __init__(self, buffer: Buffer, *, peer: str) -> None:
        super().__init__(buffer, org="", peer=peer)
        # How many rounds of Arrivals.catch_up had begun before this call did (router/gate/arrivals.py).
        self.round = 0
        # The caller. None if the cluster does not authenticate, or if the method is open to everybody.
        self.principal: Principal | None = None
        # Whether the call is counted for the org of its caller. That org is known before the request has come.
        self.caller_counted = False
        # Whether the call is counted among the calls of `org`.
        self.counted = False

    def set_current(self) -> None:
        """Makes this the call that the current task serves."""
        _CALL.set(self)


def current_call() -> Call:
    """Returns the call that the current task serves."""
    return _CALL.get()
