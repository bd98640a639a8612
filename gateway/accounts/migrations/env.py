"""Alembic's entry point: migrates on the connection in `config.attributes`, in its transaction.

To add a migration, write `versions/vNNNN_what.py` by hand, then set `schema.VERSION` to its
revision and update the tables in `schema`; tests compare the two on both databases. Migrations only
add: in a rolling upgrade the previous version still runs on the new schema.
"""

from __future__ import annotations

from alembic import context

from gateway.accounts.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
