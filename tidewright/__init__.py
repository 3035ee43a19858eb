"""Tidewright for those who use it: the ``tide`` command, the HTTP client, and the elastic trainer runtime."""
