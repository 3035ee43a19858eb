"""Queueing: who gets how much. The only allocator, and the arbiter of how a job ends.

Consumes ``tide.job``, ``tide.worker``, ``tide.scaling`` and ``tide.capacity``; publishes ``tide.allocation``.
Owns the schema ``queueing``: workloads, charges, promises, waiting, parked, capacity, tombstones.
Active once: one loop over all topics, state in memory, one transaction a turn (PROTOCOL: queueing is one loop).
"""
