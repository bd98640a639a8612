"""The first schema. Changes nothing: an empty database gets its tables from `schema`."""

revision = "20261128c"
down_revision = None


def upgrade() -> None:
    """Change nothing: `database.create_tables` has made all tables."""
