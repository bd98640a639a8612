"""Masks a request before its key, its log and its deployment, and gives each reader the values again.

Off unless an alias or a team is set. Invariants: a request that could not be masked goes nowhere; the body that is
masked has the same numbers whatever the order of its fields; labels, by which budgets go, become digests.
"""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import replace

from cache import MissReason
from gateway.accounts import Identity, partition_of
from gateway.deployments.alias import Alias
from gateway.journey.outcomes import Looked, SemanticResult
from gateway.journey.shared_stream import Reader
from gateway.journey.storing import chunks_of
from gateway.journey.turn import NO_LABELS, Ended, Labels, Turn
from gateway.loggers import get_logger
from gateway.masking.answers import Restorer
from gateway.masking.vault import Vault, masked_value
from gateway.settings import MaskSettings, Settings
from gateway.wire.chunks import UNREADABLE, decoded
from gateway.wire.errors import ApiError, BadRequest
from gateway.wire.fold import fold
from gateway.wire.texts import texts_in
from gateway.wire.types import Chunk

_LABELS = ("user", "safety_identifier", "prompt_cache_key", "metadata")
_ON_LOOP_CHARS_MAX = 4 << 10  # a value takes some 15 µs, a scan 20 µs a KB: more is masked in a thread
_log = get_logger()


class Masks:
    """Masks the requests of the aliases and teams that the settings name. One per worker."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._made_of: MaskSettings | None = None
        self._finder: Any = None

    async def masked(self, turn: Turn, identity: Identity, alias: Alias) -> Turn:
        """`turn` with placeholders, and with its `vault` if it has any. Raises ApiError where that fails."""
        if turn.vault is not None or not self._settings.is_masked(alias.name, identity.team.name):
            return turn
        # decision: masked-before-the-key
        try:
            return await self._masked(turn, partition_of(self._settings.secret, identity.team.id))
        except Exception as error:  # its message may hold a value
            _log.error("masking_failed", request_id=turn.arrival.request_id, reason=type(error).__name__)
            raise ApiError(
                "The gateway could not mask this request, so it went nowhere: send it without deeply nested parts",
                code="masking_failed",
            ) from None

    async def _masked(self, turn: Turn, key: bytes) -> Turn:
        if self._finder is None or self._made_of != self._settings.mask:
            made_of = self._settings.mask.model_copy()  # libraries and tables take 60 ms
            self._made_of, self._finder = made_of, await asyncio.to_thread(_finder_of, made_of)
        finder = self._finder
        native = None if turn.native is None else decoded(turn.native.raw)
        headers = turn.arrival.trace.headers if turn.arrival.trace is not None else ()
        sent = *msgspec.structs.astuple(turn.labels), *(value for _, value in headers)
        text = "\0".join(texts_in([turn.body, turn.marked, native, *sent]))
        is_short = len(text) <= _ON_LOOP_CHARS_MAX
        if not (finder.has_any(text) if is_short else await asyncio.to_thread(finder.has_any, text)):
            return turn
        applying = turn, native, key, Vault(finder.spans)
        return _applied(*applying) if is_short else await asyncio.to_thread(_applied, *applying)

    def fitting(self, looked: Looked, turn: Turn, identity: Identity, alias: Alias) -> Looked:
        """`looked` without an answer found by meaning that has a placeholder which the request has not: its reader
        would get it as it is.
        """
        entry = looked.semantic.entry
        if entry is None or not self._settings.is_masked(alias.name, identity.team.name):
            return looked
        vault = turn.vault or Vault(lambda *_: [])
        if not odd_placeholders(vault, chunks_of(entry))[1]:
            return looked
        semantic, why = looked.semantic, MissReason.DOCUMENTS.value
        missed = SemanticResult(similarity=semantic.similarity, miss_reason=why, asking=semantic.asking)
        return replace(looked, entry=None, semantic=missed)

    def shown(
        self, turn: Turn | None, masked: Turn | None, identity: Identity | None, ended: Ended
    ) -> tuple[Turn | None, Ended]:
        """A turn and its end for the record: `masked`, if it got so far; else, where it would have been or its body
        was not read, without texts and labels, and with placeholders in the words of a refusal.
        """
        if identity is None or masked is not None:
            return masked or turn, ended
        settings, team = self._settings, identity.team.name
        aliases = settings.models if turn is None else [turn.alias]
        if not any(settings.is_masked(alias, team) for alias in aliases):
            return turn, ended
        try:  # a refusal may quote a value
            refusal = Vault(self._finder.spans).masked(ended.refusal) if self._finder is not None else ""
        except Exception:
            refusal = ""  # what cannot be masked is not recorded
        return turn and replace(turn, body={}, labels=NO_LABELS), replace(ended, refusal=refusal)


def _finder_of(settings: MaskSettings) -> Any:
    from gateway.masking.finder import Finder  # its libraries are an extra

    return Finder(settings)


def _applied(turn: Turn, native: Any, key: bytes, vault: Vault) -> Turn:
    """The turn, masked. `native` is the decoded body of its request to Anthropic's API."""
    form, text = turn.body.get("response_format"), turn.body.get("text")
    form = text.get("format") if form is None and isinstance(text, dict) else form
    vault.is_json = isinstance(form, dict) and form.get("type") in ("json_object", "json_schema")

    def labelled(value: Any) -> Any:
        if isinstance(value, dict):
            return {labelled(name): labelled(item) for name, item in value.items()}
        if isinstance(value, list):
            return [labelled(item) for item in value]
        if not isinstance(value, str) or Vault(vault.find).masked(value) == value:
            return value
        return f"masked-{blake2b(value.encode('utf-8', 'replace'), digest_size=8, key=key).hexdigest()}"

    def body_of(body: dict[str, Any]) -> dict[str, Any]:
        labels = {name: labelled(body[name]) for name in _LABELS if name in body}
        rest = {name: value for name, value in body.items() if name not in labels}
        masked = masked_value(rest, vault) | labels
        return {name: masked[name] for name in body}

    body = body_of(turn.body)
    labels = turn.labels
    if labels is not NO_LABELS:
        header, session = (labelled(text) if text else "" for text in (labels.header, labels.session))
        labels = Labels(labelled(labels.metadata), header, session)
    masked = replace(turn, body=body, labels=labels, marked=turn.marked and body_of(turn.marked))
    if turn.native is not None:
        raw = msgspec.json.encode(body_of(native))
        masked = replace(masked, native=replace(turn.native, raw=raw, apart=masked_value(turn.native.apart, vault)))
    for part in turn.upload.files if turn.upload is not None else ():
        part.name, part.filename = vault.masked(part.name), part.filename and vault.masked(part.filename)
    if (trace := turn.arrival.trace) is not None:  # baggage, in which no placeholder fits
        headers = tuple(
            [(name, value) for name, value in trace.headers if name == "traceparent" or labelled(value) == value]
        )
        masked = replace(masked, arrival=replace(turn.arrival, trace=replace(trace, headers=headers)))
    return replace(masked, vault=vault) if len(vault) else masked


class MaskedReader(Reader, eq=False, kw_only=True):
    """A reader whose client gets the values of its own request again."""

    restorer: Restorer
    _failure: Exception | None = None

    @property
    def is_at_end(self) -> bool:
        return super().is_at_end and not self.restorer.is_holding

    async def next(self) -> list[Chunk] | None:
        """As a reader's; what waits for the rest of a placeholder leaves at the end, also before an error."""
        while self._failure is None:
            try:
                batch = await super().next()
            except Exception as error:
                self._failure = error
                if rest := self.restorer.rest():
                    return rest
                break
            if not batch:
                return self.restorer.rest() if batch is not None else None
            if ready := self.restorer.feed(batch):
                return ready
        raise self._failure

    async def whole(self) -> list[Chunk]:
        return self.restorer.all(await super().whole())


def odd_placeholders(vault: Vault, chunks: Sequence[Chunk]) -> tuple[int, int]:
    """How many placeholders of an answer came back changed, and how many its request did not have."""
    try:
        answer = fold(chunks)
        return vault.odd("\n".join(texts_in(decoded(answer))))
    except BadRequest:  # a model nested it too deeply
        return vault.odd(answer.decode())
    except UNREADABLE:  # events as the provider sent them
        return 0, 0
