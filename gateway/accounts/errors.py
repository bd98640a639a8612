"""The errors of the accounts.

    AccountsError          the message is written for the admin
    ├── DoesNotExist       no team, key or budget has this id
    ├── AlreadyExists      the name is taken, or the team has a budget of this kind
    ├── Invalid            a value out of its range; `field` names it
    └── SchemaUnknown      the tables are of another version of Sameway

An unreachable database raises sqlalchemy's own errors.
"""


class AccountsError(Exception):
    """The base of the accounts' errors: `str()` is a sentence that may be shown."""


class DoesNotExist(AccountsError):
    """No team, key or budget has that id."""


class AlreadyExists(AccountsError):
    """The name is taken, or the team has a budget of this kind."""


class Invalid(AccountsError):
    """A value out of its range."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class SchemaUnknown(AccountsError):
    """The database's schema is of a version that this code does not know."""
