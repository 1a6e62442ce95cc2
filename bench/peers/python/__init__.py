"""Peers written in Python: a module each, called otherwise than what it imports.

They run in the peers' own virtual environment, not in ours.
"""
