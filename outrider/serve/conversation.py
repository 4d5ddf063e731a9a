"""Messages of chat requests as the engine takes them: a role and a string, and calls of tools."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from outrider.serve.fields import Body, Neutral

Role = Literal["system", "developer", "user", "assistant", "tool"]
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


def _arguments(value: Any) -> Any:
    """The arguments of a call: JSON, of an object."""
    try:
        read = json.loads(value) if isinstance(value, str) else None
    except ValueError as error:
        raise ValueError(f"no valid JSON: {error}") from None
    if not isinstance(read, dict):
        raise ValueError("must be a JSON object, written as a string")
    return read


class CalledFunction(Body):
    """Which function the model called, and with which arguments."""

    name: str
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_arguments), WithJsonSchema({"type": "string"})
    ]


class ToolCall(Body):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def call(self) -> dict[str, Any]:
        """The call for the chat template, which takes arguments as an object."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(Body):
    """One turn of a conversation: a message, an answer that called tools, or a tool's result."""

    NEUTRAL: ClassVar[Neutral] = {
        "function_call": (),
        "audio": (),
        "refusal": (),
        "annotations": ([],),
    }

    role: Role
    content: Text | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only for role 'assistant'")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id: for role 'tool', and needed there")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: must be a string, or a list of parts of text")
        return self

    @property
    def message(self) -> dict[str, Any]:
        """The message for the chat template."""
        message: dict[str, Any] = {
            "role": _ROLES.get(self.role, self.role),
            "content": self.content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [each.call for each in self.tool_calls]
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1)]
