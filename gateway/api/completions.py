"""`POST /v1/completions`: a text is continued, by the way of a chat and told in the same form.

Shapes: OpenAI API reference, "Create completion".
"""

from gateway.api.chat import Chat
from gateway.wire.types import COMPLETION


class Completions(Chat):
    """The endpoint. One instance per worker."""

    route = COMPLETION.name
    kind = COMPLETION
