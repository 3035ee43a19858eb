"""Decisions of scaling: what continuity is, and how many workers a job would use well."""
