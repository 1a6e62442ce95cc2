"""Starts processes through a fork server of multiprocessing. The program itself may use another fork server. The two
are separate, so the imports and ignored signals of this server do not affect the program's own processes. Windows has
no fork server.

The server has one thread, and forks the processes. The worker's process does not fork, because its other threads may
run an event loop or hold locks, and the fork could hang.
"""

from __future__ import annotations

from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from types import FunctionType, SimpleNamespace

_server = forkserver.ForkServer()
_server.set_forkserver_preload(["windrow.handler_server"])
# A copy of the module `forkserver` that starts new processes through our server.
_with_our_server = SimpleNamespace(**{**vars(forkserver), "connect_to_new_process": _server.connect_to_new_process})
_start: FunctionType = vars(popen_forkserver.Popen)["_launch"]


class _Popen(popen_forkserver.Popen):
    # The method calls the server through the global name `forkserver`. Give the method globals in which this name is
    # our copy of the module.
    _launch = FunctionType(_start.__code__, {**vars(popen_forkserver), "forkserver": _with_our_server})


class ForkedProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # noqa: N802 - multiprocessing calls it so
        return _Popen(process_obj)
