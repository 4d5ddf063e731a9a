"""Checks that a pair of models decodes exactly: drafts never change the output."""

from typing import Any

import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.runtime import HFModel

SAMPLED = Sampling(temperature=0.9, seed=3, max_new_tokens=12, ignore_eos=True)


def near(family: str = "llama", **settings: Any) -> HFModel:
    """A draft model for ``tiny`` of the same settings: its weights with some noise. Unlike tokens
    of an unrelated model, many of its tokens are accepted, so that outputs depend on what the
    target computes for every node of a draft."""
    model = tiny(family, **settings)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight += (0.01 * torch.randn(weight.shape, generator=generator)).to(weight)
    return model


def assert_exact(target: HFModel, draft: HFModel) -> None:
    """Outputs with drafts equal those of plain decoding, token for token: with chains and trees,
    alone and in batches, greedy and under the coupled rule."""
    prompts = ragged_prompts([9, 3, 14, 6], target.num_tokens)
    plain = engine_of(target, max_batch_size=1)
    for sampling, methods in ((greedy(16), ("speculative", "top-k-tree")), (SAMPLED, ("coupled",))):
        wanted = token_ids(plain.generate(prompts, sampling))
        for method in methods:
            for batch in (1, 3):
                engine = engine_of(target, draft, method, max_batch_size=batch)
                engine.verification = None  # rules are compiled for real in tests of their own
                results = engine.generate(prompts, sampling)
                assert token_ids(results) == wanted
                assert results.stats.acceptance_length > 1.2
