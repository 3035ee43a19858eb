"""Decisions of scaling: pure functions and values."""
