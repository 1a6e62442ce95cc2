"""Decides which org is served next by consumers that work for all orgs."""
