"""Tests of one module or one class, without Postgres."""
