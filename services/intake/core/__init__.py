"""Decisions of intake: pure functions and values."""
