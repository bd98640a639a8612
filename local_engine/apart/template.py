"""The program that renders a checkpoint's chat template.

`process` runs it. Jinja's sandbox keeps a template from files and attributes. Knows no messages and
no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

_CHARS_MAX = 1 << 24  # as many as the largest request has bytes


def opened(source: str) -> Callable[[dict[str, Any]], str]:
    """The template in the dialect that `transformers` defines: sandboxed, trimmed blocks, and a few
    more functions."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    class GenerationTag(jinja2.ext.Extension):
        """{% generation %} marks a training target: here its content is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    template = environment.from_string(source)

    def render(values: dict[str, Any]) -> str:
        parts, size = [], 0
        for part in template.generate(**values):
            size += len(part)
            if size > _CHARS_MAX:
                refuse(f"it writes more than {_CHARS_MAX:,} characters")
            parts.append(part)
        return "".join(parts)

    return render
