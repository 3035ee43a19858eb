"""Decisions of metrics: pure functions and values."""
