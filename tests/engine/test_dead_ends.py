"""Parameters that leave no token to sample fail their own request and no other."""

from typing import Any

import pytest
import torch
from tiny_models import VOCAB, engine_of, ragged_prompts, tiny
from torch import Tensor

from outrider import Engine, Sampling
from outrider.core.errors import DeadEndError

TARGET, DRAFT = tiny(), tiny(seed=1)
METHODS = ["plain", "speculative", "block", "traversal", "sequoia", "hybrid", "staged"]
PROMPT = ragged_prompts([5])[0]
INF = float("inf")


class From:
    """A processor that sets all logits to one value from a sequence length on."""

    def __init__(self, length: int, value: float) -> None:
        self.length = length
        self.value = value

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.length:
            return scores
        return torch.full_like(scores, self.value, dtype=torch.float64).to(scores.dtype)


class EndsAt:
    """A processor that allows only token 7 at one sequence length, and no token after it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.length:
            return scores
        left = torch.full_like(scores, -INF)
        if input_ids.shape[1] == self.length:
            left[:, 7] = 0.0
        return left


def engine(method: str) -> Engine:
    return engine_of(TARGET, None if method == "plain" else DRAFT, method, γ=3)


@pytest.mark.parametrize("value", [-INF, INF, float("nan"), 1e39])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["plain", "speculative"])
def test_a_processor_that_forbids_all_tokens(method: str, temperature: float, value: float) -> None:
    other = From(10**9, 0.0)
    sampling = Sampling(temperature=temperature, processors=[other, From(8, value)])
    message = r"request 0: .*position 8 \(token 3 of the output\): logits processor 1 \(From\)"
    with pytest.raises(DeadEndError, match=message):
        engine(method).generate([PROMPT], sampling)


@pytest.mark.parametrize(
    ("named", "settings"),
    [
        ("logit_bias", {"logit_bias": dict.fromkeys(range(VOCAB), -INF)}),
        ("logit_bias", {"logit_bias": {5: 1e39}}),
        ("repetition_penalty=1e-40", {"repetition_penalty": 1e-40}),
        ("frequency_penalty=-1e+39", {"frequency_penalty": -1e39}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_parameter_that_forbids_all_tokens_is_named(
    named: str, settings: dict[str, Any], temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, **settings)
    with pytest.raises(DeadEndError, match=named.replace("+", r"\+")):
        engine("plain").generate([PROMPT], sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_only_tokens_that_are_emitted_count(method: str, temperature: float) -> None:
    """Drafts extend past the end; tokens that are forbidden there cause no error."""
    sampling = Sampling(temperature=temperature, processors=[EndsAt(8)], stop=[7])
    result = engine(method).generate([PROMPT], sampling)[0]
    assert result.finish_reason == "stop"
    longer = Sampling(temperature=temperature, processors=[EndsAt(8)])
    if len(result.token_ids) == 4:  # otherwise, 7 was sampled earlier
        with pytest.raises(DeadEndError, match="position 9"):
            engine(method).generate([PROMPT], longer)


def test_a_dead_end_names_its_request_and_leaves_others_alone() -> None:
    prompts = ragged_prompts([5, 9, 3])
    samplings = [
        Sampling(max_new_tokens=12),
        Sampling(max_new_tokens=12, processors=[From(12, -INF)]),
        Sampling(max_new_tokens=12),
    ]
    each = engine("speculative")
    alone = [each.generate([prompts[i]], samplings[i])[0].token_ids for i in (0, 2)]
    with pytest.raises(DeadEndError, match=r"request 1: .*position 12 ") as caught:
        each.generate(prompts, samplings)
    first, failed, third = caught.value.results
    assert failed is None
    assert [first.token_ids, third.token_ids] == alone
    assert each.generate([prompts[0]], samplings[0])[0].token_ids == alone[0]


@pytest.mark.parametrize("temperature", [1e-6, 0.7])
def test_a_huge_bias_forces_its_token_at_any_temperature(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, logit_bias={5: 3e38}, max_new_tokens=4)
    assert engine("speculative").generate([PROMPT], sampling)[0].token_ids == (5,) * 4


def test_more_logprobs_than_tokens() -> None:
    """Every token appears exactly once at each position."""
    for number in (VOCAB, VOCAB + 1, 10**5000):
        sampling = Sampling(logprobs=number, max_new_tokens=5)
        result = engine("speculative").generate([PROMPT], sampling)[0]
        assert [sorted(top.token_ids) for top in result.top_logprobs] == [list(range(VOCAB))] * 5
