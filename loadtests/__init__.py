"""Benchmarks: one module each, run as ``python -m loadtests.NAME``."""
