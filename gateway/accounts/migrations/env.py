"""What alembic runs to migrate: on the connection it is handed (`config.attributes`), inside that one's transaction.

To add a migration: write `versions/vNNNN_what.py` by hand, set `schema.VERSION` to its revision and the tables in
`schema` to what it leaves; tests compare the two on both databases. Migrations only add: in a rolling upgrade the
version before still runs on the new schema.
"""

from __future__ import annotations

from alembic import context

from gateway.accounts.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
