"""Peers written in Python, one module each. A module must not have the name of the library that it imports.

They run in the peers' own virtual environment, not in ours.
"""
