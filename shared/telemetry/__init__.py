"""Logs, instruments and trace context."""
