"""One row of the ledger, and its form on the way from Redis to SQL.

Knows neither. Invariant: what `decode` accepts every database accepts, so a row that reached SQL's door never fails
there by its own fault.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]
_Text = Annotated[str, Meta(max_length=512)]


class LedgerRow(msgspec.Struct, frozen=True):
    """What one generation cost, and on whose behalf. `id` is its hold's, `at_ms` the hold's moment (unix ms)."""

    id: Annotated[str, Meta(min_length=1, max_length=200)]
    at_ms: Annotated[int, Meta(ge=0, le=2**53 - 1)]
    request_id: _Text
    team_id: _Id
    key_id: _Id
    alias: _Text
    deployment: _Text
    prompt_tokens: _Count
    cached_tokens: _Count
    completion_tokens: _Count
    cost_microusd: _Count
    kind: _Text


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LedgerRow)


def encode_row(row: LedgerRow) -> bytes:
    """msgpack, fields by name: a row of an earlier or later version can be read."""
    return _encoder.encode(row)


def decode_row(data: bytes) -> LedgerRow:
    """Raises msgspec.DecodeError (and its ValidationError) for what is not a row or out of range."""
    row = _decoder.decode(data)
    if "\0" in row.id + row.request_id + row.alias + row.deployment + row.kind:  # PostgreSQL has no NUL in texts
        raise msgspec.ValidationError("a text holds a NUL")
    return row
