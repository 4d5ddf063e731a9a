"""How models write calls of functions. A model was trained with one of these formats, which shows
in its chat template.

Hermes and Qwen:     <tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>
Llama 3.1 and 3.2:   {"name": "f", "parameters": {"x": 1}}
Mistral:             [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]

Readers of a format also take lists of calls between the marks, which SmolLM2 was trained to write,
and both names of the arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

_PROBE = "outrider_probe"


@dataclass(frozen=True)
class CallFormat:
    """A format of calls.

    Attributes:
        name: how messages call it.
        begin, end: the marks around a call, or around all calls; empty where there are none.
        arguments: the key of the arguments.
        before, after: what the model writes between the marks and the calls.
        between: what it writes between two calls.
        repeats: whether each call has marks of its own.
        sign: what chat templates of this format contain.
    """

    name: str
    begin: str
    end: str
    arguments: str
    before: str
    after: str
    between: str
    repeats: bool
    sign: str


HERMES = CallFormat(
    "hermes", "<tool_call>", "</tool_call>", "arguments", "\n", "\n", "\n", True, "<tool_call>"
)
LLAMA = CallFormat("llama3", "", "", "parameters", "", "", "; ", False, '"parameters"')
MISTRAL = CallFormat(
    "mistral", "[TOOL_CALLS]", "", "arguments", " [", "]", ", ", False, "[TOOL_CALLS]"
)
FORMATS = (HERMES, MISTRAL, LLAMA)

_UNREAD = ("[ARGS]", "<function=")
"""What templates of formats contain that look like others and are not read."""


def format_of(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """The format that a chat template shows; None where it shows none that is known, or does not
    tell the model of tools at all.

    Args:
        tokenizer: one with a chat template.
    """
    tools: list[Any] = [{"type": "function", "function": _probe()}]
    template = tokenizer.get_chat_template(tools=tools)
    if not _tells_of_tools(tokenizer, tools) or any(sign in template for sign in _UNREAD):
        return None
    return next((each for each in FORMATS if each.sign in template), None)


def _tells_of_tools(tokenizer: PreTrainedTokenizerBase, tools: list[Any]) -> bool:
    """Whether the template writes a tool's name."""
    messages = [{"role": "user", "content": "x"}]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception:  # a template is a program of the model's authors
        return False
    return _PROBE in str(text)


def _probe() -> Mapping[str, Any]:
    return {
        "name": _PROBE,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
