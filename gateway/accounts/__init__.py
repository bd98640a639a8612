"""Teams, keys, definitions of budgets and the ledger, in SQL.

Must not import another room of the gateway but `settings`; knows no HTTP. The names
here are values, which import no sqlalchemy. Read `teams.py` first, then `accounts.py`.
"""

from gateway.accounts.errors import AccountsError, AlreadyExists, DoesNotExist, Invalid, SchemaUnknown
from gateway.accounts.row import HitsRow, LedgerRow, booked, charges_of, decode_row, encode_row
from gateway.accounts.teams import Identity, Key, NewKey, Team, partition_of, scope_of

__all__ = [
    "AccountsError",
    "AlreadyExists",
    "DoesNotExist",
    "HitsRow",
    "Identity",
    "Invalid",
    "Key",
    "LedgerRow",
    "NewKey",
    "SchemaUnknown",
    "Team",
    "booked",
    "charges_of",
    "decode_row",
    "encode_row",
    "partition_of",
    "scope_of",
]
