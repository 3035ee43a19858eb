"""Intake: the door. Is a request valid, allowed and new; what users see.

Consumes: allocation, worker, metric, scaling and capacity for the read model, and its own job topic for history.
Publishes: ``tide.job.submitted``, ``changed``, ``ended``.
Owns (schema ``intake``): ``jobs`` with the request register, ``environments`` (which execution may read),
``idempotency``, and the read model: ``registers``, ``history``, ``queues``, ``capacity``.
"""
