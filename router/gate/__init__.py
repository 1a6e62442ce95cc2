"""Admission, decoding and checks that every call passes first."""
