"""The texts in a body of any API: what a person or a model wrote, apart from names, ids and settings.

Pure. Shapes: OpenAI's API reference (chat completions, completions, responses, embeddings), Anthropic's "Messages",
Cohere's "Rerank". Invariant: each text is found, and replaced, wherever it stands; nothing else changes.
"""

from collections.abc import Callable
from typing import Any

from gateway.wire.errors import BadRequest

_NAMES = """
    arguments content documents input instructions output prompt query reasoning reasoning_content refusal suffix
    summary system text thinking
"""
_TEXTS = frozenset(_NAMES.split())
_OF_TYPE = {  # fields that are texts in an object of this `type` alone
    "code_interpreter_call": ("code",),
    "document": ("title", "context"),
    "logs": ("logs",),
    "search_result": ("title", "source"),
    "text": ("data",),
}
_VALUES = frozenset({"arguments", "input", "output"})  # of a tool's call: an object has texts under any name


def texts_in(body: Any) -> dict[str, None]:
    """The texts of a decoded body, each once, in their order. Raises BadRequest for a body that is too deep."""
    texts: dict[str, None] = {}

    def add(text: str) -> str:
        texts[text] = None
        return text

    try:
        _walked(body, add)
    except RecursionError:
        raise BadRequest("The body is nested too deeply", code="invalid_json") from None
    return texts


def swapped(body: Any, texts: dict[str, str]) -> Any:
    """`body` with other texts, by those that they replace."""
    return _walked(body, lambda text: texts.get(text, text))


def _walked(node: Any, visit: Callable[[str], str], *, is_text: bool = False, is_value: bool = False) -> Any:
    if isinstance(node, str):
        return visit(node) if node and (is_text or is_value) else node
    if isinstance(node, list):
        return [_walked(item, visit, is_text=is_text, is_value=is_value) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    texts = _OF_TYPE.get(kind, ()) if isinstance(kind, str) else ()
    return {
        name: _walked(
            item,
            visit,
            is_text=name in _TEXTS or name in texts,
            is_value=is_value or (name in _VALUES and isinstance(item, dict)),
        )
        for name, item in node.items()
    }
