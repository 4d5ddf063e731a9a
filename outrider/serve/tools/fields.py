"""What requests say of tools, and which of them an answer may call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from outrider.serve.errors import ApiError
from outrider.serve.fields import Body

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_WORDS = ("none", "auto", "required")


class FunctionFields(Body):
    """A function, under OpenAI's names.

    Attributes:
        name: how the model calls it.
        description: what it does, for the model.
        parameters: a JSON schema of its arguments; None for a function without arguments.
        strict: whether its arguments must obey the schema wherever the model calls it.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of a chat request."""

    type: Literal["function"]
    function: FunctionFields


@dataclass(frozen=True)
class NamedTool:
    """The choice of one function, which the answer must call."""

    name: str


def _choice(value: Any) -> Any:
    """``none``, ``auto``, ``required``, or a function by its name; in chat requests the name is
    inside of ``function``, in those of responses beside ``type``."""
    if value is None or value in _WORDS:
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        named = value.get("function", value)
        name = named.get("name") if isinstance(named, dict) else None
        if isinstance(name, str) and value.keys() <= {"type", "function", "name"}:
            return NamedTool(name)
    raise ValueError(
        "must be 'none', 'auto', 'required', or a function, as in "
        "{'type': 'function', 'function': {'name': …}}"
    )


ToolChoice = Annotated[
    Any,
    BeforeValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(_WORDS)},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
                {"type": "null"},
            ]
        }
    ),
]
"""Whether the answer may or must call functions."""


@dataclass(frozen=True)
class ToolUse:
    """The functions that an answer may call.

    Attributes:
        functions: at least one.
        required: whether the answer must consist of calls.
        parallel: whether it may have more than one.
    """

    functions: tuple[FunctionFields, ...]
    required: bool = False
    parallel: bool = True

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The functions as chat templates read them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": each.name,
                    "description": each.description or "",
                    "parameters": schema_of(each),
                },
            }
            for each in self.functions
        ]


def schema_of(function: FunctionFields) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    return nothing if function.parameters is None else function.parameters


def tool_use(
    functions: Sequence[FunctionFields], choice: str | NamedTool | None, parallel: bool | None
) -> ToolUse | None:
    """What a request's fields come to; None where the answer calls nothing.

    Raises:
        ApiError: two functions of one name, or a choice without its function.
    """
    names = [each.name for each in functions]
    for name in names:
        if names.count(name) > 1:
            raise ApiError(f"tools: two functions have the name {name!r}", param="tools")
    if not functions and choice not in (None, "none", "auto"):
        raise ApiError("tool_choice: there are no tools to call: send tools", param="tool_choice")
    if not functions or choice == "none":
        return None
    chosen = tuple(functions)
    if isinstance(choice, NamedTool):
        chosen = tuple(each for each in functions if each.name == choice.name)
        if not chosen:
            raise ApiError(
                f"tool_choice: no function {choice.name[:80]!r} in tools, which has "
                f"{', '.join(names)}",
                param="tool_choice",
            )
    required = choice not in (None, "auto")
    parallel = parallel is not False and not isinstance(choice, NamedTool)
    return ToolUse(chosen, required, parallel)
