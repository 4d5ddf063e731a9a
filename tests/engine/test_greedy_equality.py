"""At temperature 0, outputs with penalties, bias and processors equal those of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    VOCAB,
    engine_of,
    full_logits,
    greedy,
    hf_generate,
    ragged_prompts,
    tiny,
    token_ids,
    uniform_method,
)
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from outrider import Sampling
from outrider.core.errors import IncompatibleError
from outrider.methods import METHODS, Method
from outrider.runtime import HFModel

LENGTHS = [6, 1, 13]
NUM = 16


class OutputPenalty(LogitsProcessor):
    """Presence and frequency penalties as a ``transformers`` processor; only the output counts."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        count_V = torch.bincount(input_ids[0, self.prompt_length :], minlength=scores.shape[1])
        penalty_V = self.presence * (count_V > 0) + self.frequency * count_V
        return scores - penalty_V


class Bias(LogitsProcessor):
    """``logit_bias`` as a ``transformers`` processor."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, bias in self.bias.items():
            scores[:, token] += bias
        return scores


BIAS = {7: 6.0, 11: 5.0, 20: -8.0, 33: float("-inf")}
CASES: dict[str, tuple[dict[str, Any], Callable[[int], list[LogitsProcessor]]]] = {
    "repetition": (
        {"repetition_penalty": 1.7},
        lambda n: [RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "presence": ({"presence_penalty": 3.0}, lambda n: [OutputPenalty(n, 3.0, 0.0)]),
    "frequency": ({"frequency_penalty": 2.5}, lambda n: [OutputPenalty(n, 0.0, 2.5)]),
    "negative": ({"presence_penalty": -2.0}, lambda n: [OutputPenalty(n, -2.0, 0.0)]),
    "bias": ({"logit_bias": BIAS}, lambda n: [Bias(BIAS)]),
    "processors": (
        {
            "processors": LogitsProcessorList(
                [NoRepeatNGramLogitsProcessor(2), SuppressTokensLogitsProcessor([1, 2, 3])]
            )
        },
        lambda n: [NoRepeatNGramLogitsProcessor(2), SuppressTokensLogitsProcessor([1, 2, 3])],
    ),
    "everything": (
        {
            "logit_bias": BIAS,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.7,
            "processors": [NoRepeatNGramLogitsProcessor(3)],
        },
        lambda n: [
            Bias(BIAS),
            RepetitionPenaltyLogitsProcessor(1.3),
            OutputPenalty(n, 0.5, 0.7),
            NoRepeatNGramLogitsProcessor(3),
        ],
    ),
}


@pytest.fixture(scope="module")
def target() -> HFModel:
    return tiny("llama", std=0.2)


@pytest.mark.parametrize("case", CASES)
def test_plain_speculative_and_transformers_agree(target: HFModel, case: str) -> None:
    settings, processors = CASES[case]
    prompts = ragged_prompts(LENGTHS)
    sampling = greedy(NUM, **settings)
    expected = [
        hf_generate(target.module, p, NUM, logits_processor=LogitsProcessorList(processors(len(p))))
        for p in prompts
    ]
    unchanged = [hf_generate(target.module, p, NUM) for p in prompts]
    assert expected != unchanged
    assert token_ids(engine_of(target).generate(prompts, sampling)) == expected
    for draft in (HFModel(target.module), tiny("llama", 1)):
        for method in ("speculative", "greedy"):
            engine = engine_of(target, draft, method, γ=5)
            assert token_ids(engine.generate(prompts, sampling)) == expected
    good = engine_of(target, HFModel(target.module), γ=5).generate(prompts, sampling)
    assert good.stats.acceptance_rate == 1, (
        "the draft's distribution must be warped like the target's"
    )


@pytest.mark.parametrize("case", ["everything", "frequency"])
def test_penalties_follow_the_path_of_a_tree(case: str) -> None:
    """The penalties of a node count its own ancestors and no other nodes."""
    target = tiny("llama", vocab_size=40, std=0.2)
    prompts = ragged_prompts(LENGTHS, 40)
    sampling = greedy(NUM, **CASES[case][0])
    plain = engine_of(target).generate(prompts, sampling)
    trees = engine_of(target, None, uniform_method(width=16), γ=64).generate(prompts, sampling)
    assert token_ids(plain) == token_ids(trees)
    assert trees.stats.accepted > 5


def test_temperature_zero_in_a_mixed_batch_is_still_the_argmax(target: HFModel) -> None:
    """A sampled row switches the batch to rejection sampling, which must not change greedy rows."""
    prompts = ragged_prompts(LENGTHS)
    draft = tiny("llama", 0, std=0.19)
    sampled = Sampling(temperature=1, max_new_tokens=NUM, ignore_eos=True)
    results = engine_of(target, draft).generate(prompts, [greedy(NUM), sampled, greedy(NUM)])
    for row in (0, 2):
        assert results[row].token_ids == hf_generate(target.module, prompts[row], NUM)


def test_truncation_has_no_effect_at_temperature_zero(target: HFModel) -> None:
    prompts = ragged_prompts(LENGTHS)
    plain = engine_of(target).generate(prompts, greedy(NUM))
    for settings in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}):
        assert token_ids(engine_of(target).generate(prompts, greedy(NUM, **settings))) == token_ids(
            plain
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["plain", "speculative", "tree"])
def test_logprobs_are_the_targets_own(target: HFModel, method: str, temperature: float) -> None:
    """log softmax of a full forward pass, whatever the sampling parameters."""
    how: Method | str = uniform_method(width=2) if method == "tree" else METHODS[method]
    draft = tiny("llama", 0, std=0.19)
    engine = engine_of(target, draft, how)
    prompts = ragged_prompts(LENGTHS)
    sampling = [
        Sampling(
            temperature=temperature,
            max_new_tokens=12,
            ignore_eos=True,
            top_k=9,
            logprobs=n,
            repetition_penalty=1.2,
        )
        for n in (0, 3, None)
    ]
    results = engine.generate(prompts, sampling)
    for prompt, result in zip(prompts, results, strict=True):
        logits_TV = full_logits(target.module, [*prompt, *result.token_ids])[len(prompt) - 1 : -1]
        wanted_TV = logits_TV.log_softmax(-1)
        if result is results[2]:
            assert result.logprobs == result.top_logprobs == ()
            continue
        chosen_T = wanted_TV.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), chosen_T, atol=1e-4, rtol=1e-4)
        if result is results[1]:
            assert len(result.top_logprobs) == 12
            best = wanted_TV.topk(3)
            for place, top in enumerate(result.top_logprobs):
                assert list(top.token_ids) == best.indices[place].tolist()
                torch.testing.assert_close(
                    torch.tensor(top.logprobs), best.values[place], atol=1e-4, rtol=1e-4
                )
        else:
            assert result.top_logprobs == ()


def test_more_logprobs_than_tokens(target: HFModel) -> None:
    result = engine_of(target).generate(ragged_prompts([3]), greedy(2, logprobs=10_000))[0]
    assert [len(top.token_ids) for top in result.top_logprobs] == [VOCAB, VOCAB]


def test_the_greedy_method_is_for_temperature_zero_only(target: HFModel) -> None:
    engine = engine_of(target, tiny("llama", 1), "greedy")
    with pytest.raises(IncompatibleError, match=r"temperature 0 only, not at 0\.5") as caught:
        engine.generate([[1]], Sampling(temperature=0.5))
    assert "\n" not in str(caught.value)
