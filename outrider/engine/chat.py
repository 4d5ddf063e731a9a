"""Chat messages as a prompt, by the tokenizer's own template.

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why do cats purr?"}]

A message is a mapping with ``role`` and ``content``, both strings; what else it has (``name``,
``tool_calls``) is the template's business. The template writes the special tokens, and ends where
the assistant's answer begins.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.core.errors import PromptError
from outrider.core.values import check_string, shown

Message = Mapping[str, Any]
"""One turn of a conversation: who speaks (``role``), and what is said (``content``)."""

_EXAMPLE = '{"role": "user", "content": "Hello!"}'


def check_messages(messages: Sequence[object]) -> list[Message]:
    """The messages of a conversation.

    Raises:
        PromptError: none at all, or one without a role or a content, naming its number.
    """
    if not messages:
        raise PromptError(f"the conversation has no messages: give at least [{_EXAMPLE}]")
    checked: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"messages[{number}]={shown(message)}: must be such as {_EXAMPLE}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise PromptError(
                    f"messages[{number}][{key!r}]={shown(message.get(key))}: must be a string, as "
                    f"in {_EXAMPLE}"
                )
        checked.append(message)
    return checked


def encode_messages(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Message],
    name: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[int, ...]:
    """A conversation's token ids, up to where the assistant's answer begins.

    Args:
        tokenizer: the target's.
        messages: the conversation.
        name: how messages call the target.
        tools: the functions that the model may call, for a template that tells it of them.

    Raises:
        PromptError: a model without a tokenizer or a chat template, a conversation that the
            template does not accept, or a lone surrogate in it.
    """
    if tokenizer is None:
        raise PromptError(f"{name} has no tokenizer: give the prompt as token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"{name} has no chat template, so it was not trained to chat: give a text to continue, "
            f"take a model that was (its name often ends in -Instruct or -Chat), or set "
            f"tokenizer.chat_template"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template is a program of the model's authors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PromptError(
            f"the chat template of {name} refuses these messages: {reason}"
        ) from error
    assert isinstance(text, str)  # since tokenize=False
    check_string(text, "the conversation, as the chat template writes it,")
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
