"""Teams, keys, definitions of budgets and the ledger, in SQL.

Must not import another room of the gateway but `settings`; knows no HTTP. Names that need a
database (`Accounts`, `Ledger`, `LedgerWriter`) are imported on first use, so that importing the
values here does not import sqlalchemy. Read `teams.py` first, then `accounts.py`.
"""

from typing import TYPE_CHECKING, Any

from gateway.accounts.errors import AccountsError, AlreadyExists, DoesNotExist, Invalid, SchemaUnknown
from gateway.accounts.row import HitsRow, LedgerRow, booked, charges_of, decode_row, encode_row
from gateway.accounts.teams import Identity, Key, NewKey, Team, partition_of, scope_of

if TYPE_CHECKING:
    from gateway.accounts.accounts import Accounts
    from gateway.accounts.audit import Audit, AuditRow
    from gateway.accounts.ledger import Group, Ledger, LedgerFilter, LedgerPage, LedgerTotal, SavingsLine
    from gateway.accounts.ledger_writer import HitsWriter, LedgerWriter, WriterStats

__all__ = [
    "Accounts",
    "AccountsError",
    "AlreadyExists",
    "Audit",
    "AuditRow",
    "DoesNotExist",
    "Group",
    "HitsRow",
    "HitsWriter",
    "Identity",
    "Invalid",
    "Key",
    "Ledger",
    "LedgerFilter",
    "LedgerPage",
    "LedgerRow",
    "LedgerTotal",
    "LedgerWriter",
    "NewKey",
    "SavingsLine",
    "SchemaUnknown",
    "Team",
    "WriterStats",
    "booked",
    "charges_of",
    "decode_row",
    "encode_row",
    "partition_of",
    "scope_of",
]

_LATE = {
    **dict.fromkeys(("Group", "Ledger", "LedgerFilter", "LedgerPage", "LedgerTotal", "SavingsLine"), "ledger"),
    **dict.fromkeys(("HitsWriter", "LedgerWriter", "WriterStats"), "ledger_writer"),
    **dict.fromkeys(("Audit", "AuditRow"), "audit"),
    "Accounts": "accounts",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
