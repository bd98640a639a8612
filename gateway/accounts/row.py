"""One row of the ledger, and its encoding on the way from Redis to SQL.

No Redis and no SQL. Invariant: both databases accept each row that `decode_row` accepts, so no row
makes an insert fail.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from policies import Usage
from policies.holds import Charge, Taken
from policies.windows import Unit

COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_microusd")
"""The ledger's first summed columns; KINDS are the others."""

_counted = Usage.__struct_fields__
KINDS = _counted[_counted.index("cache_write_tokens") : _counted.index("tool_calls") + 1]
"""The counts that providers bill apart."""

BOOKED = (*(name for name in COUNTS if name in _counted), *KINDS, "provider_cost_microusd")
"""The fields of a `Usage` that are columns of the ledger."""

SUMS = ("requests", *COUNTS, "saved_microusd", "checks_microusd")
"""What the sums of rows have, and HIT_SUMS those of hits."""

HIT_SUMS = ("hits", "saved_microusd")

VERIFY, CHECK, REFRESH = "verify", "check", "refresh"
CHECKING = frozenset({VERIFY, CHECK, REFRESH})
"""The kinds of a question to a verifier, of an answer that is generated to check a hit, and of one that
takes the place of a stale one."""

_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_COUNT_MAX = 2**53 - 1
_Count = Annotated[int, Meta(ge=0, le=_COUNT_MAX)]
_Text = Annotated[str, Meta(max_length=512)]
_Amount = Annotated[int, Meta(ge=-_COUNT_MAX, le=_COUNT_MAX)]


class LedgerRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cost of one generation. `id` is the id of its hold, `at_ms` the hold's time (unix ms).

    `usage` has the counts that are columns of the table (`booked`). `usage_estimated`: the
    deployment did not report the tokens. `baseline_microusd`: the cost without Sameway, None if
    unknown. Of its difference to the cost, the provider's prompt cache saved
    `prefix_read_microusd`, its writes cost `prefix_write_microusd`, and `mechanism` explains the
    remainder. `user` and `session` are those that the request named, and `tags` a JSON object of its
    tags; each may be empty (`journey/needs.py`). A question to a verifier has those of the request
    that it is about. `region` is what the settings say of the deployment. `charges`, which is not a column of the table, lists the row's
    amounts for the counts of budgets.
    """

    id: Annotated[str, Meta(min_length=1, max_length=200)]
    at_ms: Annotated[int, Meta(ge=0, le=_COUNT_MAX)]
    request_id: _Text
    team_id: _Id
    key_id: _Id
    alias: _Text
    deployment: _Text
    usage: Usage
    cost_microusd: _Count
    kind: _Text
    usage_estimated: bool = False
    baseline_microusd: _Count | None = None
    prefix_read_microusd: _Amount = 0
    prefix_write_microusd: _Amount = 0
    mechanism: _Text = ""
    user: _Text = ""
    tags: Annotated[str, Meta(max_length=16_384)] = ""
    session: _Text = ""
    region: _Text = ""
    charges: tuple[Charge, ...] = ()

    @property
    def saved_microusd(self) -> int:
        """The baseline less the cost; 0 where the baseline is not known."""
        return 0 if self.baseline_microusd is None else self.baseline_microusd - self.cost_microusd

    @property
    def checks_microusd(self) -> int:
        """The cost of a row in CHECKING; 0 of others."""
        return self.cost_microusd if self.kind in CHECKING else 0

    def savings(self) -> list[tuple[str, int]]:
        """The baseline less the cost, by mechanism, without zero amounts; negative amounts are
        costs.
        """
        if self.baseline_microusd is None:
            return []
        read, written = self.prefix_read_microusd, self.prefix_write_microusd
        other_microusd = self.saved_microusd - read + written
        if not (read or written or other_microusd):
            return []
        parts = (("prefix_read", read), ("prefix_write", -written), (self.mechanism or "other", other_microusd))
        return [part for part in parts if part[1]]

    def tags_by_name(self) -> dict[str, str]:
        """The tags as a dict. Raises msgspec.DecodeError unless they are a JSON object of texts."""
        return _decode_tags(self.tags) if self.tags else {}


class HitsRow(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that cost nothing and agree in all texts and ids, in one hour.

    `source` is exact, semantic or coalesced; `user`, `tags` and `session` are as in a LedgerRow.
    `unknown` counts the `requests` without a known baseline; `baseline_microusd` sums the known
    baselines.
    """

    id: str
    at_ms: int
    team_id: int
    key_id: int
    alias: str
    source: str
    requests: int
    unknown: int
    baseline_microusd: int
    user: str = ""
    tags: str = ""
    session: str = ""


def charges_of(row: LedgerRow, counts: Iterable[Taken]) -> tuple[Charge, ...]:
    """The amounts that `row` adds to its hold's `counts`, each in the count's unit."""
    amounts = {
        Unit.MONEY: row.cost_microusd,
        Unit.TOKENS: row.usage.prompt_tokens + row.usage.completion_tokens,
        Unit.REQUESTS: 1,
    }
    return tuple([Charge(c.name, c.field, amounts[c.unit], c.keep_until_ms) for c in counts if c.field])


def booked(usage: Usage) -> Usage:
    """`usage` with only the counts that are columns of the ledger."""
    return usage if usage.is_plain else Usage(**{name: getattr(usage, name) for name in BOOKED})


def columns_of(names: Sequence[str]) -> Callable[[LedgerRow], tuple[Any, ...]]:
    """A function that reads the values of the columns `names` from a row."""
    return attrgetter(*[f"usage.{name}" if name in BOOKED else name for name in names])


_encoder = msgspec.msgpack.Encoder()
_decode_tags = msgspec.json.Decoder(dict[str, str]).decode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


def encode_row(row: LedgerRow) -> bytes:
    """Encode as msgpack with field names, so that earlier and later versions can read it.

    The counts of `usage` stand beside the other fields, as in the table. Earlier versions need
    COUNTS.
    """
    fields = msgspec.to_builtins(row)
    return _encoder.encode({**dict.fromkeys(COUNTS, 0), **fields.pop("usage"), **fields})


def decode_row(data: bytes) -> LedgerRow:
    """Decode a row.

    Raises msgspec.DecodeError (and its ValidationError) for other bytes and for values out of
    range.
    """
    try:
        fields = _decode(data)
        row = msgspec.convert({"usage": fields, **fields}, LedgerRow)
    except (UnicodeDecodeError, RecursionError) as error:  # as `cache.stored`, whose package needs a Redis client
        raise msgspec.DecodeError(str(error)) from None
    # PostgreSQL refuses NUL in texts
    if "\0" in "".join([text for text in msgspec.structs.astuple(row) if isinstance(text, str)]):
        raise msgspec.ValidationError("a text holds a NUL")
    if row.tags and any("\0" in name + value for name, value in row.tags_by_name().items()):
        raise msgspec.ValidationError("a tag holds a NUL")
    counts = [count for count in msgspec.structs.astuple(row.usage) if isinstance(count, int)]
    if not (min(counts) >= 0 and max(counts) <= _COUNT_MAX):
        raise msgspec.ValidationError("a count is out of range")
    return row
