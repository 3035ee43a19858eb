"""Decisions of queueing: pure functions and values."""
