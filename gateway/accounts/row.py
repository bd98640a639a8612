"""One row of the ledger, and its encoding on the way from Redis to SQL.

No Redis and no SQL. Invariant: both databases accept each row that `decode_row` accepts, so no
insert fails by its row.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]
_Text = Annotated[str, Meta(max_length=512)]


class LedgerRow(msgspec.Struct, frozen=True):
    """The cost of one generation. `id` is the id of its hold, `at_ms` the hold's time (unix ms).

    `prompt_tokens` include the tokens read from the provider's prompt cache (`cached_tokens`),
    written to it (`cache_write...`), of sounds and of images; `completion_tokens` include
    reasoning, sounds and images. `tool_calls`: calls of tools that the provider ran.
    `usage_estimated`: the deployment did not report the tokens.
    """

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
    # an earlier version's rows lack the rest
    usage_estimated: bool = False
    cache_write_tokens: _Count = 0
    cache_write_1h_tokens: _Count = 0
    audio_prompt_tokens: _Count = 0
    image_prompt_tokens: _Count = 0
    reasoning_tokens: _Count = 0
    audio_completion_tokens: _Count = 0
    image_completion_tokens: _Count = 0
    tool_calls: _Count = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LedgerRow)


def encode_row(row: LedgerRow) -> bytes:
    """Encode as msgpack with field names, so that earlier and later versions can read it."""
    return _encoder.encode(row)


def decode_row(data: bytes) -> LedgerRow:
    """Decode a row.

    Raises msgspec.DecodeError (and its ValidationError) for other bytes and for values out of
    range.
    """
    row = _decoder.decode(data)
    # PostgreSQL refuses NUL in texts
    if "\0" in row.id + row.request_id + row.alias + row.deployment + row.kind:
        raise msgspec.ValidationError("a text holds a NUL")
    return row
