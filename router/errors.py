"""Errors of a router that cannot start. Imports nothing, so that the supervisor and the CLI need not load gRPC."""

# The exit code of a router process that needs an operator to correct something: starting it again cannot help.
EXIT_NO_RETRY = 78


class CannotListen(Exception):
    """The address is in use, or is not an address of this machine. The message names it."""


class ListensOpenly(CannotListen):
    """Others can reach the address, and the cluster file protects it too little. The message says what is missing."""


class CannotServeMetrics(CannotListen):
    """The address of the metrics is in use, or is not an address of this machine. The message names it."""


class RouterFailed(Exception):
    """A router process cannot be started."""


class RouterGaveUp(RouterFailed):
    """A router process ended, and starting it again cannot help until an operator has corrected something. The process
    has written the reason to standard error."""
