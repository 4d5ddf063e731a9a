"""Stateful logits processors are detected before a draft corrupts them, or called in order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, engine_of, ragged_prompts, tiny, token_ids
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from outrider import Engine, Sampling
from outrider.core.errors import IncompatibleError, InvalidParameterError

TARGET, DRAFT = tiny(), tiny(std=0.28)
PROMPTS = ragged_prompts([5, 9])
NUM = 20


class Every:
    """Forbids half of the vocabulary in every n-th call."""

    def __init__(self, n: int = 3) -> None:
        self.n = n
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(tuple(input_ids[0].tolist()))
        if len(self.seen) % self.n == 0:
            scores = scores.clone()
            scores[:, : VOCAB // 2] = -torch.inf
        return scores


class Matcher:
    """Consumes a token whenever the sequence has grown, like a grammar without rollback."""

    __slots__ = ("length", "state")

    def __init__(self) -> None:
        self.length = self.state = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > self.length:
            self.length = input_ids.shape[1]
            self.state += 1
        scores[:, self.state % VOCAB] = -torch.inf
        return scores


def counting_closure() -> Callable[[Tensor, Tensor], Tensor]:
    calls = [0]

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        calls[0] += 1
        return scores

    return processor


class Marks:
    """Counts the last tokens that it was called with in an array."""

    def __init__(self) -> None:
        self.marks = np.zeros(VOCAB)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.marks[int(input_ids[0, -1])] += 1
        return scores


class Remembers:
    """Caches its results, which is harmless."""

    def __init__(self) -> None:
        self.known: dict[int, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = int(input_ids[0, -1])
        if last not in self.known:
            self.known[last] = torch.zeros_like(scores).index_fill_(1, input_ids[0, -1:], -3.0)
        return scores + self.known[last]


def engine(method: str = "speculative") -> Engine:
    return engine_of(TARGET, None if method == "plain" else DRAFT, method)


def sampling(processor: Any, temperature: float = 1.0, **settings: Any) -> Sampling:
    return Sampling(temperature, processors=[processor], max_new_tokens=NUM, **settings)


@pytest.mark.parametrize(
    "make", [Every, Matcher, Marks, counting_closure, lambda: partial(Every())]
)
def test_state_is_detected(make: Callable[[], Any]) -> None:
    message = r"processors\[0\] .*pass stateless=False .* or stateless=True"
    with pytest.raises(InvalidParameterError, match=message):
        engine().generate([PROMPTS[0]], sampling(make()))


@pytest.mark.parametrize(
    "processor",
    [
        NoBadWordsLogitsProcessor([[5], [6, 7]]),
        NoRepeatNGramLogitsProcessor(2),
        SuppressTokensLogitsProcessor([1, 2]),
        LogitsProcessorList([SuppressTokensLogitsProcessor([1])]),
        Remembers(),
        lambda input_ids, scores: scores,
    ],
)
def test_stateless_processors_raise_no_error(processor: Any) -> None:
    result = engine().generate([PROMPTS[0]], sampling(processor, 0.0))[0]
    assert result.stats.drafted > 0
    assert (
        result.token_ids
        == engine("plain").generate([PROMPTS[0]], sampling(processor, 0.0))[0].token_ids
    )


def test_a_declaration_as_stateless_is_trusted() -> None:
    result = engine().generate([PROMPTS[0]], sampling(Every(10**9), stateless=True))[0]
    assert result.stats.drafted > 0


def test_plain_decoding_needs_no_check() -> None:
    processor = Every()
    engine("plain").generate([PROMPTS[0]], sampling(processor))
    assert len(processor.seen) == NUM


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["speculative", "sequoia", "staged", "early-exit"])
def test_calls_in_order_equal_those_of_plain_decoding(method: str, temperature: float) -> None:
    """With the same calls, beside another request that is drafted for."""
    other = Sampling(max_new_tokens=NUM)
    expected, calls = [], []
    target = engine_of(tiny(num_hidden_layers=3), DRAFT, method)
    plain = engine_of(tiny(num_hidden_layers=3))
    for each in (plain, target):
        processor = Every()
        mine = sampling(processor, temperature, stateless=False)
        results = each.generate(PROMPTS, [mine, other])
        expected.append(results[0].token_ids)
        calls.append(processor.seen)
    assert expected[0] == expected[1]
    assert calls[0] == calls[1]
    tokens = (*PROMPTS[0], *expected[0])
    assert calls[1] == [tokens[: len(PROMPTS[0]) + n] for n in range(NUM)]
    assert (results[0].stats.drafted, results[1].stats.drafted > 0) == (0, True)


def test_a_processor_belongs_to_one_request() -> None:
    mine = sampling(Every(), stateless=False)
    with pytest.raises(InvalidParameterError, match="give each request a processor of its own"):
        engine().generate(PROMPTS, mine)
    both = [sampling(Every(), stateless=False) for _ in PROMPTS]
    alone = [engine().generate([p], sampling(Every(), stateless=False))[0] for p in PROMPTS]
    assert token_ids(engine().generate(PROMPTS, both)) == token_ids(alone)


def test_searches_cannot_run_in_order() -> None:
    with pytest.raises(IncompatibleError, match="'mjgd' searches"):
        engine_of(TARGET, None, "mjgd").generate(
            [PROMPTS[0]], sampling(Every(), 0.0, stateless=False)
        )


def test_other_values_of_stateless() -> None:
    with pytest.raises(InvalidParameterError, match="stateless='no'"):
        Sampling(stateless="no")  # type: ignore[arg-type]
