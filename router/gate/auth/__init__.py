"""Who calls, and what the caller may do: proofs of identity, scopes, and the end of calls whose proof is not valid any
more."""
