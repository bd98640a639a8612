"""The first schema. An empty database gets its tables at once, from `schema`, so nothing runs here."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Change nothing: `database._create` has made all tables."""
