"""Grammars: the form that an answer must have, which decides the tokens that may come next.

Built on llguidance, which reads JSON schemas, regular expressions and context-free grammars. Knows
tokens and their spellings; no model, no queue. Invariants: an answer that ends by its grammar
matches it whole; a grammar that cannot be enforced exactly is refused before a token is generated;
a grammar is first compiled in a separate process, so that no schema can crash the engine.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from local_engine.apart.process import AT_ONCE, Apart, ProgramRefusal
from local_engine.messages import Grammar, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from local_engine.text.tokenizer import Thinking, Tokenizer

SIZE_MAX_BYTES = 1 << 18
# a compiled grammar was measured at up to 420 bytes for each of its text
_KEPT_SIZE_MAX_BYTES, _KEPT_BYTES = 1 << 19, 1 << 12  # of all texts, and of each one at least
_LIMITS: dict[str, Any] = {"max_lexer_states": 20_000}  # 2 KB each
_AT_ONCE_S = 2e-4  # masks that take less are made before the model runs: a thread costs as much
_FORCED_BYTES = 1 << 9  # made tokens at a time: a literal is read again at each step


class GrammarState:
    """The state of one answer in its grammar. `thinks`: it is inside a thinking block, which the
    grammar ignores; `may_think`: it may begin with one."""

    def __init__(self, compiled: Compiled, thinking: Thinking | None) -> None:
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._opens, self._closes = thinking.block if thinking is not None else (-1, -1)
        self.thinks = thinking is not None and thinking.is_open
        self.may_think = thinking is not None and thinking.may_open

    @property
    def is_over(self) -> bool:
        """Whether no token can follow."""
        return not self.thinks and bool(self._matcher.is_stopped())

    def take(self, token: int) -> None:
        """Advance by a token. Raises InvalidRequest if it, or the grammar's size, forbids that."""
        if self.thinks or (self.may_think and token == self._opens):
            self.thinks = token != self._closes
            self.may_think = False
            return
        self.may_think = False
        if not self._matcher.consume_token(token):
            self._compiled.is_spent = True
            raise InvalidRequest(
                f"the answer met a place where the grammar is too complex to go on: {_brief(self._matcher.get_error())}",
                param="grammar",
            )

    def forced(self) -> tuple[int, ...]:
        """The next tokens while only one is allowed."""
        return () if self.thinks or self.may_think else tuple(self._matcher.compute_ff_tokens())

    def part(self, draft: tuple[int, ...]) -> tuple[int, ...]:
        """The allowed beginning of `draft`."""
        if self.thinks:
            return draft[: draft.index(self._closes)] if self._closes in draft else draft
        return () if self.may_think else draft[: self._matcher.validate_tokens(list(draft))]

    def fill(self, bits: np.ndarray[Any, Any], draft: tuple[int, ...], eos: Iterable[int]) -> None:
        """Clear the bits of the forbidden next tokens, and of those after each token of `draft`, in
        rows of 32-bit words."""
        if self.thinks:
            for token in eos:
                bits[:, token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
            return
        address, size_bytes = bits.ctypes.data, bits.strides[0]
        for row, token in enumerate((*draft, -1)):
            self._matcher.unsafe_compute_mask_ptr(address + row * size_bytes, size_bytes)
            if token < 0 or not self._matcher.try_consume_tokens([token]):
                break
        self._matcher.rollback(row)
        if self.may_think:
            bits[0, self._opens // 32] |= np.uint32(1 << self._opens % 32).view(np.int32)


class Compiled:
    """A grammar compiled for one model. `is_spent`: an answer reached the limit of its states,
    which all its answers share."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.is_spent = False


class Grammars:
    """The compiled grammars of one model. It keeps the latest for each caller's salt. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int, eos: frozenset[int]) -> None:
        self._tokenizer, self._size, self._eos = tokenizer, vocabulary_size, eos
        self._trials: SimpleQueue[Apart] = SimpleQueue()
        for _ in range(AT_ONCE):
            self._trials.put(Apart("grammar", _LIMITS))
        self._kept: OrderedDict[tuple[bytes, Grammar], Compiled | InvalidRequest] = OrderedDict()
        self._lock = threading.Lock()
        self._library: LLTokenizer | None = None

    def compiled(self, wanted: Grammar, salt: bytes) -> Compiled:
        """The grammar, compiled now or recently; compiling takes from milliseconds to seconds, and
        grammars compile in parallel. Raises InvalidRequest if it cannot be enforced."""
        result = self.kept(wanted, salt) or self._made(wanted)
        if len(wanted.text) <= SIZE_MAX_BYTES:
            with self._lock:
                self._kept[salt, wanted] = result
                self._kept.move_to_end((salt, wanted))
                self._make_room()
        if isinstance(result, InvalidRequest):
            raise InvalidRequest(str(result), param=result.param)
        return result

    def kept(self, wanted: Grammar, salt: bytes) -> Compiled | InvalidRequest | None:
        """The compiled grammar, or the error that refused it, while it is kept."""
        with self._lock:
            found = self._kept.get((salt, wanted))
        return None if isinstance(found, Compiled) and found.is_spent else found

    def _make_room(self) -> None:
        """Drop the oldest grammars of the salts that hold most, but never the latest of all."""
        *others, latest = self._kept
        bytes_by_salt = Counter[bytes]()
        for salt, grammar in others:
            bytes_by_salt[salt] += len(grammar.text) + _KEPT_BYTES
        while bytes_by_salt.total() + len(latest[1].text) + _KEPT_BYTES > _KEPT_SIZE_MAX_BYTES:
            oldest = next(key for key in self._kept if key[0] == bytes_by_salt.most_common(1)[0][0])
            bytes_by_salt[oldest[0]] -= len(oldest[1].text) + _KEPT_BYTES
            del self._kept[oldest]

    def _made(self, wanted: Grammar) -> Compiled | InvalidRequest:
        # decision: programs-apart
        from llguidance import LLMatcher, LLParserLimits

        size_bytes = len(wanted.text.encode())
        try:
            if size_bytes > SIZE_MAX_BYTES:
                raise ProgramRefusal(f"it has {size_bytes:,} bytes, and may have {SIZE_MAX_BYTES:,}")
            if not self._eos:
                raise ProgramRefusal("the model has no token that ends an answer")
            trial = self._trials.get()
            try:
                grammar = trial.ask({"kind": wanted.kind, "text": wanted.text, "ids": self._tokenizer.marks})
            finally:
                self._trials.put(trial)
            limits = LLParserLimits(**_LIMITS, verbose_errors=False)
            matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise ProgramRefusal(matcher.get_error())
        except ProgramRefusal as error:
            name = _KINDS.get(wanted.kind, wanted.kind)
            why = f"the {name} cannot be held: {_brief(str(error))}; simplify it, or send the request to another model"
            return InvalidRequest(why, param="grammar")
        return Compiled(matcher)

    def _vocabulary(self) -> LLTokenizer:
        """Every token's bytes in the library's own form; built once, in up to a second."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._library is None:
                spelled = _Spelled(self._tokenizer, self._size, self._eos)
                self._library = LLTokenizer(TokenizerWrapper(spelled), eos_token=sorted(self._eos))
            return self._library


_KINDS = {"regex": "regular expression", "json": "schema", "calls": "schema"}


class _Spelled:
    """A tokenizer with the interface of the library."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(eos)
        self.tokens = [tokenizer.spell(id) for id in range(size)]
        self.special_token_ids = sorted({id for id in range(size) if tokenizer.is_special(id)} | eos)
        control = [self.tokens[id].decode(errors="replace") for id in self.special_token_ids]
        self._within = "|".join(f"(?<={re.escape(one[0])})(?={re.escape(one[1:])})" for one in control if one[1:])

    def __call__(self, text: bytes) -> list[int]:
        spelled = text[:_FORCED_BYTES].decode(errors="ignore")
        ids = self._tokenizer.encode(spelled, is_rendered=True)
        if not any(map(self._tokenizer.is_special, ids)):
            return ids
        # a literal that spells a control token is no such token
        first, *rest = re.split(self._within, spelled)
        return sum(map(self._tokenizer.encode_middle, rest), self._tokenizer.encode(first, is_rendered=True))


def _brief(why: str) -> str:
    """The library's reason in one line."""
    why = re.sub("^panic.*", "the grammar library fails on it", " ".join(why.removesuffix("<non-verbose/>").split()))
    return "nothing matches it" if why.startswith("NoExtension") else why[:300]


# waits for a bit for each token that may come at each place of a step that has a grammar, int32 [places, words]
Masks = Callable[[], np.ndarray[Any, Any]]


class Masker:
    """Computes masks, in a separate thread during the model's run if they take longer than the
    hand-over."""

    def __init__(self, vocabulary_size: int, eos: frozenset[int]) -> None:
        self._size, self._eos = vocabulary_size, eos
        self._threads = ThreadPoolExecutor(1, "masks")
        self._latest_s = 0.0  # of CPU time

    def begin(self, held: Many[tuple[GrammarState, tuple[int, ...]]]) -> Masks | None:
        """Begin the masks for the places after each answer's last token and after each token of its
        draft."""
        if not held:
            return None
        if self._latest_s > _AT_ONCE_S:
            return self._threads.submit(self._allowed, held).result
        bits = self._allowed(held)
        return lambda: bits

    def _allowed(self, held: Many[tuple[GrammarState, tuple[int, ...]]]) -> np.ndarray[Any, Any]:
        began_s = time.thread_time()
        bits = np.full((sum(len(draft) + 1 for _, draft in held), -(-self._size // 32)), -1, np.int32)
        first_row = 0
        for answer, draft in held:
            answer.fill(bits[first_row : first_row + len(draft) + 1], draft, self._eos)
            first_row += len(draft) + 1
        self._latest_s = time.thread_time() - began_s
        return bits
