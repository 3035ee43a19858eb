"""Decisions of execution: pure functions and values."""
