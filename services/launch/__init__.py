"""Starts and stops an installation: ``tide up|down|service``. Consumes and publishes nothing, owns no table."""
