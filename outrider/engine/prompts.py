"""Prompts as users have them: strings, conversations, token ids, tensors, a tokenizer's output.

One prompt is a string, a conversation (a list of chat messages, ``chat.py``), a sequence of token
ids, a 1-D tensor or array, or a tokenizer's output with 1-D ``input_ids``. A batch is an iterable
of prompts, a 2-D tensor or array, or a tokenizer's output with 2-D ``input_ids``; padding is
removed where ``attention_mask`` says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from outrider.core.errors import PromptError
from outrider.core.values import as_python, check_string, is_whole, shown
from outrider.engine.chat import Message, check_messages

Array = Tensor | np.ndarray[Any, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Array | Mapping[str, Any]
"""What may be given as one prompt."""
Prompts = Prompt | Iterable[Prompt]
"""What may be given as a batch, or as one prompt."""

_TOKENIZER_OUTPUT = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "overflowing_tokens",
    "num_truncated_tokens",
    "overflow_to_sample_mapping",
}
_REMEDY = (
    "a prompt is a string, a list of token ids, a tensor of them, a list of chat messages, or what "
    "a tokenizer returns; a batch is a list of these"
)


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt whose type has been checked.

    Attributes:
        given: the string or the token ids, as they were given; for tensors, arrays and tokenizer
            output, the token ids without padding.
        ids: the token ids; None for a string or a conversation, which the model's tokenizer has to
            encode.
        messages: the messages of a conversation; None for any other prompt.
    """

    given: str | Sequence[int] | Sequence[Message]
    ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None


def is_chat(value: object) -> bool:
    """Whether a prompt is a conversation: a list or tuple that begins with a message."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return isinstance(value[0], Mapping) and "role" in value[0]


def read_prompts(prompts: object) -> tuple[list[ReadPrompt], bool]:
    """The prompts of a batch, or of one prompt alone, and whether one prompt alone was given.

    Raises:
        PromptError: the value is neither a prompt nor a batch.
    """
    prompts = as_python(prompts)
    if isinstance(prompts, str):
        return [_text(prompts)], True
    if isinstance(prompts, Mapping):
        return _tokenizer_output(prompts)
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "OU":  # of texts, or of lists
        prompts = prompts.tolist()
    if isinstance(prompts, Tensor | np.ndarray):
        rows, single = _rows("a tensor of token ids", prompts)
        return [_of_ids(row) for row in rows], single
    if isinstance(prompts, bytes | bytearray | AbstractSet) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    listed = list(prompts)
    if is_chat(listed):
        return [_conversation(listed)], True
    return [read_prompt(prompt) for prompt in listed], False


def read_prompt(prompt: object) -> ReadPrompt:
    """One prompt.

    Raises:
        PromptError: the value is no prompt, or several.
    """
    prompt = as_python(prompt)
    if is_whole(prompt):
        raise PromptError("token ids come as a list per prompt: write [[1, 2, 3]], not [1, 2, 3]")
    if isinstance(prompt, list | tuple) and is_chat(prompt):
        return _conversation(prompt)
    if isinstance(prompt, str | Mapping | Tensor | np.ndarray):
        several, _ = read_prompts(prompt)
        if len(several) != 1:
            raise PromptError(f"{len(several)} prompts in the place of one: give them as a batch")
        return several[0]
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise _no_prompt(prompt)
    return ReadPrompt(prompt, _ids(prompt))


def _text(text: str) -> ReadPrompt:
    check_string(text, "the prompt")
    return ReadPrompt(text)


def _of_ids(values: Sequence[object]) -> ReadPrompt:
    ids = _ids(values)
    return ReadPrompt(ids, ids)


def _ids(values: Iterable[object]) -> tuple[int, ...]:
    ids = tuple(value if type(value) is int else as_python(value) for value in values)
    for token in ids:
        if not is_whole(token):
            raise PromptError(f"{shown(token)} is no token id, which is a whole number: {_REMEDY}")
    return tuple(map(int, ids))


def _tokenizer_output(output: Mapping[str, Any]) -> tuple[list[ReadPrompt], bool]:
    if is_chat([output]):
        raise PromptError("a chat message alone: give the conversation, [message]")
    if "input_ids" not in output:
        raise PromptError(f"no 'input_ids' in {shown(dict(output))}: {_REMEDY}")
    unread = [name for name in output if name not in _TOKENIZER_OUTPUT]
    if unread:
        raise PromptError(
            f"the prompt has {shown(unread[0])} beside its 'input_ids', and only token ids are "
            f"read: leave it out"
        )
    rows, single = _rows("input_ids", output["input_ids"])
    if output.get("attention_mask") is not None:
        masks, _ = _rows("attention_mask", output["attention_mask"])
        if [len(row) for row in masks] != [len(row) for row in rows]:
            raise PromptError("'attention_mask' and 'input_ids' differ in shape: give both or none")
        rows = [_without_padding(row, mask) for row, mask in zip(rows, masks, strict=True)]
    return [_of_ids(row) for row in rows], single


def _rows(name: str, values: object) -> tuple[list[Sequence[object]], bool]:
    """Numbers (T,) or (B, T), rows perhaps of different lengths, as rows; whether it was (T,)."""
    if isinstance(values, Tensor | np.ndarray):
        if values.ndim not in (1, 2):
            raise PromptError(
                f"{name} has 1 dimension for one prompt or 2 for a batch, not {values.ndim}"
            )
        return ([values.tolist()], True) if values.ndim == 1 else (values.tolist(), False)
    if not isinstance(values, list | tuple):
        raise PromptError(f"{name}={shown(values)}: must be a list, a list of lists or a tensor")
    first = as_python(values[0]) if values else None
    if isinstance(first, Sequence | Tensor | np.ndarray):
        return [_row(name, row) for row in values], False
    return [values], True


def _row(name: str, row: object) -> Sequence[object]:
    rows, single = _rows(name, row)
    if not single:
        raise PromptError(f"{name} has 1 dimension for one prompt or 2 for a batch, not 3")
    return rows[0]


def _without_padding(row: Sequence[object], mask: Sequence[object]) -> Sequence[object]:
    """The tokens between the padding on the left and on the right."""
    seen = [index for index, value in enumerate(mask) if value]
    if not seen:
        return ()
    first, end = seen[0], seen[-1] + 1
    if len(seen) < end - first:
        raise PromptError(
            "'attention_mask' has zeros between ones: only padding before and after a prompt can "
            "be left out"
        )
    return row[first:end]


def _conversation(messages: Sequence[object]) -> ReadPrompt:
    checked = tuple(check_messages(messages))
    return ReadPrompt(checked, messages=checked)


def _no_prompt(value: object) -> PromptError:
    what = "bytes: decode them first; " if isinstance(value, bytes | bytearray) else ""
    return PromptError(f"{shown(value)} is no prompt: {what}{_REMEDY}")
