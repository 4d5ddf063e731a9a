"""Conversations with the target's own answers, as token ids and a mask of what the target wrote.

A file has one JSON object per line: ``{"messages": [{"role": "user", "content": …}, {"role":
"assistant", "content": …}]}``; other keys are ignored. The chat template writes the special tokens.
A head is trained on the tokens of the assistant, the end of its turn included: these are the tokens
that it will draft.

Legend: T tokens of a sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.engine.chat import check_messages


@dataclass(frozen=True)
class Sample:
    """A conversation.

    Attributes:
        tokens: its token ids.
        answers: by token, whether the target wrote it.
    """

    tokens: tuple[int, ...]
    answers: tuple[bool, ...]

    def cut(self, num_tokens: int) -> Sample:
        """The first tokens."""
        return Sample(self.tokens[:num_tokens], self.answers[:num_tokens])


def read_samples(file: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> list[Sample]:
    """The samples of a file, in its order, cut to ``length`` tokens; those without an answer within
    them are left out.

    Raises:
        ValueError: no such file, no tokenizer with a chat template, a line that is no conversation
            with an answer (names it), or no sample at all.
    """
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the target has no chat template, which says where an answer begins: take a target "
            "that was trained to chat, or set tokenizer.chat_template"
        )
    samples = []
    for number, messages in _conversations(file):
        try:
            sample = sample_of(messages, tokenizer).cut(length)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        if any(sample.answers[2:]):
            samples.append(sample)
    if not samples:
        raise ValueError(
            f"{file} has no conversation with an answer within {length} tokens: nothing to train on"
        )
    return samples


def sample_of(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Sample:
    """The tokens of a conversation.

    Raises:
        ValueError: messages without an answer, or a template that writes earlier messages anew when
            another one follows.
    """
    check_messages(messages)
    text = _written(messages, tokenizer)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _written(messages[:number], tokenizer, opens_answer=True)
        after = _written(messages[: number + 1], tokenizer)
        if not text.startswith(after.rstrip()) or not after.startswith(before):
            raise ValueError(
                f"the chat template changes what precedes messages[{number}] once it is there, so "
                f"its answer cannot be told from the prompt: give conversations of one turn"
            )
        spans.append((len(before), len(after.rstrip())))
    if not spans:
        raise ValueError("no message has the role 'assistant', so there is nothing to learn")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answers = tuple(
        any(first <= begin < last for first, last in spans)
        for begin, _ in encoded["offset_mapping"]
    )
    return Sample(tuple(encoded["input_ids"]), answers)


def held_out(samples: list[Sample], num: int) -> tuple[list[Sample], list[Sample]]:
    """The samples to train on, and ``num`` evenly spaced ones that are kept apart.

    Raises:
        ValueError: fewer samples than that.
    """
    if num >= len(samples):
        raise ValueError(
            f"{len(samples)} samples are too few to keep {num} of them for evaluation: give more "
            f"data, or keep fewer"
        )
    chosen = {index * len(samples) // num for index in range(num)}
    kept = [sample for index, sample in enumerate(samples) if index in chosen]
    return [sample for index, sample in enumerate(samples) if index not in chosen], kept


def prompts_of(samples: Iterable[Sample]) -> list[list[int]]:
    """What precedes the first answer of each sample: prompts for generation."""
    return [list(sample.tokens[: sample.answers.index(True)]) for sample in samples]


def _conversations(file: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                messages = json.loads(line)["messages"]
            except (ValueError, KeyError, TypeError):
                messages = None
            if not isinstance(messages, list):
                raise ValueError(
                    f'{file}, line {number}: must be a JSON object such as {{"messages": '
                    f'[{{"role": "user", "content": "Hello!"}}, {{"role": "assistant", "content": '
                    f'"Hello, how are you?"}}]}}'
                )
            yield number, messages


def _written(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    opens_answer: bool = False,
) -> str:
    if not messages:
        return ""
    text: Any = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=opens_answer
    )
    return str(text)
