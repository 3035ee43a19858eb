"""Scaling: how many workers a job would use well. It proposes; queueing grants.

Consumes ``job`` (limits, mode, hold), ``allocation`` (what is granted), ``worker`` (which group trains), ``metric``.
Publishes ``scaling``. Owns the schema ``scaling``: ``jobs``.
"""
