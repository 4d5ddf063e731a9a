"""Rules that read more than the argmax at temperature 0, end to end."""

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, tiny_module, token_ids

from outrider import Sampling

TARGET = tiny("llama", 0, dtype=torch.float64)
DRAFT = tiny("llama", 3, dtype=torch.float64)
PROMPTS = ragged_prompts([5, 2, 8, 4])
SAMPLED = Sampling(max_new_tokens=12, ignore_eos=True)
OPTIONS = {
    "ensemble": {"weight": 0.4},
    "cascade": {"alpha": 0.9},
    "relaxed": {"top_k": 30, "delta": 1.0},
}


@pytest.mark.parametrize("method", OPTIONS)
def test_greedy_and_sampled_requests_do_not_disturb_each_other(method: str) -> None:
    engine = engine_of(TARGET, DRAFT, method, options=OPTIONS[method])
    samplings = [greedy(12), SAMPLED, greedy(12), SAMPLED]
    together = token_ids(engine.generate(PROMPTS, samplings))
    for prompt, sampling, tokens in zip(PROMPTS, samplings, together, strict=True):
        assert token_ids(engine.generate([prompt], sampling)) == [tokens]


@pytest.mark.parametrize("method", OPTIONS)
def test_they_deviate_from_the_argmax_and_accept_more(method: str) -> None:
    plain = token_ids(engine_of(TARGET).generate(PROMPTS, greedy(12)))
    strict = engine_of(TARGET, DRAFT, "greedy").generate(PROMPTS, greedy(12))
    loose = engine_of(TARGET, DRAFT, method, options=OPTIONS[method])
    assert token_ids(strict) == plain
    results = loose.generate(PROMPTS, greedy(12))
    assert token_ids(results) != plain
    assert results.stats.acceptance_rate > strict.stats.acceptance_rate


@pytest.mark.parametrize("weight", [0.2, 0.5, 0.8])
def test_ensemble_equals_transformers(weight: float) -> None:
    """The first round of ``assistant_ensemble_weight``, greedy, token for token.

    In later rounds, the draft's KV cache in transformers 5.23 does not always match the sequence,
    so drafts differ.
    """
    target, draft = (tiny_module("llama", seed, dtype=torch.float64) for seed in (0, 3))
    for module in (target, draft):
        module.generation_config.eos_token_id = None
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    engine = engine_of(TARGET, DRAFT, "ensemble", 3, options={"weight": weight})
    lengths = set()
    for prompt in ragged_prompts([5] * 12, seed=1):
        ids = torch.tensor([prompt])
        done = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=draft,
            assistant_ensemble_weight=weight,
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
        first = next(engine.stream(prompt, greedy(6))).token_ids
        assert first == tuple(done[0, len(prompt) :].tolist())[: len(first)]
        lengths.add(len(first))
    assert len(lengths) > 1
