"""The processes of a router: the supervisor and its children."""
