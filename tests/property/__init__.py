"""Tests by generated examples, against models."""
