"""Tests of modules against a Postgres server."""
