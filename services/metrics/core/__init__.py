"""Decisions of metrics: which sample counts, what a window amounts to, which points of a curve stay."""
