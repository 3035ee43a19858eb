"""The public HTTP API: request and answer bodies of ``/v1``."""
