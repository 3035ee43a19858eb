"""Metrics: what a job's samples amount to in a window.

Consumes ``worker`` (which group of a job trains) and ``job`` (its end), and the trainers' ``POST /v1/samples``.
Publishes ``metric``. Owns the schema ``metrics``: ``jobs``, ``samples``, ``curves``.
"""
