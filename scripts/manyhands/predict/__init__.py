"""Formulas: bytes, messages and operations, before anything has run."""
