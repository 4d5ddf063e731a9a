"""Messages of chat requests as the engine takes them: a role and a string."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from outrider.serve.fields import Body, Neutral

Role = Literal["system", "developer", "user", "assistant"]
_ROLES = {"developer": "system"}  # OpenAI's newer word, which few templates know


def _text(value: Any) -> str:
    """The text of a message: a string, or a list of parts of text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, or a list of parts such as {'type': 'text', 'text': …}")
    texts = []
    for part in value:
        kinds = ("text", "input_text", "output_text")
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise ValueError(f"a part of type {kind!r}: this server reads text only")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' must have a string as its 'text'")
        texts.append(part["text"])
    return "".join(texts)


Text = Annotated[
    str,
    BeforeValidator(_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
"""A string, or parts of text, which are joined."""


class ChatMessage(Body):
    """One turn of a conversation."""

    NEUTRAL: ClassVar[Neutral] = {
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
        "refusal": (),
        "tool_call_id": (),
        "annotations": ([],),
    }

    role: Role
    content: Text
    name: str | None = None

    @property
    def message(self) -> dict[str, str]:
        """The message for the chat template."""
        message = {"role": _ROLES.get(self.role, self.role), "content": self.content}
        return message if self.name is None else message | {"name": self.name}


Messages = Annotated[list[ChatMessage], Field(min_length=1)]
