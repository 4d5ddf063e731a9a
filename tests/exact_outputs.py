"""Checks that a pair of models decodes exactly: drafts never change the output."""

from tiny_models import engine_of, greedy, ragged_prompts, token_ids

from outrider import Sampling
from outrider.runtime import HFModel

SAMPLED = Sampling(temperature=0.9, seed=3, max_new_tokens=12, ignore_eos=True)


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
                assert token_ids(engine.generate(prompts, sampling)) == wanted
