"""Who calls, and what he may do: proofs of identity, scopes, and the end of calls whose proof is no longer good."""
