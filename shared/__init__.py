"""Mechanisms without business meaning: clock, errors, settings, telemetry, database, bus, outbox, runtime."""
