"""Starts an installation: ``tide up``, ``tide down``, ``tide service``. Consumes and publishes nothing, owns no table."""
