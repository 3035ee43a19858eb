"""Alembic's entry: runs the migrations on the connection that ``shared.db.migrate`` hands over."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table_schema="log", transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
