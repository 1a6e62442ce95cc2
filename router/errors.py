"""How a router fails to start, told to whoever started it. Imports nothing: the supervisor, and the commands that run
one, need no gRPC for it."""

# A router process ends with it: no second try can help, unless somebody mends what it has said.
HOPELESS = 78


class CannotListen(Exception):
    """The address is taken, or not this machine's; the message says which address."""


class RouterFailed(Exception):
    """A router process said that no second try can help; its own message is on standard error."""
