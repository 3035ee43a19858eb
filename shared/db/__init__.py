"""Postgres: engines, errors, types, transactions, migrations, and the embedded server."""
