"""Tests of commands, as a user runs them."""
