"""Some outputs of a cell, with the text and the origin of each token, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.engine.detokenize import Detokenizer
from outrider.lab.bench.record import Repeat
from outrider.lab.data import Example

NUM_SAMPLES = 3


def samples_of(
    repeat: Repeat,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase | None,
    num: int = NUM_SAMPLES,
) -> list[dict[str, Any]]:
    """The first outputs of a repeat: ``id``, ``task``, ``turn``, ``prompt`` (its last message or
    text), and ``pieces``, a list of [text, origin letter]. None without a tokenizer."""
    if tokenizer is None:
        return []
    found = []
    for request in list(repeat.requests)[:num]:
        example = examples[request.example]
        pieces = pieces_of(request.token_ids, request.origins, tokenizer)
        found.append(
            {
                "id": example.id,
                "task": example.task,
                "turn": request.turn,
                "prompt": _text(example, request.turn),
                "pieces": pieces,
            }
        )
    return found


def pieces_of(
    token_ids: Sequence[int], origins: str, tokenizer: PreTrainedTokenizerBase
) -> list[list[str]]:
    """Each token's text with its origin. Where several tokens are one character, the last of them
    has its text."""
    detokenizer = Detokenizer(tokenizer, (), special=True)
    pieces = [
        [detokenizer.push([token]), origin]
        for token, origin in zip(token_ids, origins, strict=True)
    ]
    if pieces:
        pieces[-1][0] += detokenizer.flush()
    return pieces


def _text(example: Example, turn: int) -> str:
    if turn:
        return example.later[turn - 1].text
    return str(example.messages[-1]["content"])
