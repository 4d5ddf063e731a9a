"""How examples become prompts: by the chat template, or as texts to continue.

auto   as the data set has them: conversations by the template, texts as they are; of a model
       without a template, conversations of one message as texts
chat   everything as a conversation; a text is the user's message
text   everything as a text; of a conversation, the user's first message alone
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from outrider.core.errors import InvalidParameterError
from outrider.lab.data.example import DataSet, Example
from outrider.runtime import HFModel

Prompts = Literal["auto", "chat", "text"]
PROMPTS: tuple[Prompts, ...] = get_args(Prompts)


def as_prompts(data: DataSet, how: Prompts, target: HFModel) -> DataSet:
    """The data set with every prompt in the form that ``how`` says.

    Raises:
        InvalidParameterError: conversations, and a model without a chat template.
    """
    has_template = bool(getattr(target.tokenizer, "chat_template", None))
    return replace(
        data,
        examples=tuple(_as_prompt(each, how, has_template, target.name) for each in data.examples),
    )


def with_forced_references(data: DataSet) -> DataSet:
    """The data set with its reference answers as outputs: as if the models had been perfect, which
    measures what a method gains on such outputs alone. Speed is real, and acceptance is that of
    the reference.

    Raises:
        InvalidParameterError: an example without a reference, or with several turns.
    """
    for example in data:
        if example.reference is None or example.later:
            raise InvalidParameterError(
                f"forced=True: example {example.id!r} of data set {data.name} has "
                f"{'no reference' if example.reference is None else 'several turns'}: leave it out"
            )
    return replace(data, examples=tuple(replace(each, forced=True) for each in data))


def _as_prompt(example: Example, how: Prompts, has_template: bool, model: str) -> Example:
    is_chat = how == "chat" or (how == "auto" and not isinstance(example.prompt, str))
    single = len(example.messages) == 1 and not example.later
    if how == "auto" and is_chat and not has_template and single:
        is_chat = False
    if is_chat and not has_template:
        raise InvalidParameterError(
            f"example {example.id!r} is a conversation, and {model} has no chat template, so it "
            f"was not trained to chat: take a model that was, or prompts='text', which continues "
            f"the first message as a text"
        )
    if is_chat:
        return replace(example, prompt=example.messages)
    return replace(example, prompt=_first_text(example), later=())


def _first_text(example: Example) -> str:
    users = (each for each in example.messages if each["role"] == "user")
    return str(next(users, example.messages[0])["content"])
