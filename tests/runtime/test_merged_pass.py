"""A pass in which equal siblings share a column says and keeps what a pass over all nodes does.

Legend: B rows, N nodes.
"""

from dataclasses import replace

import pytest
import torch
from tiny_models import NoMemory, UniformDrafter, ragged_prompts, tiny

from outrider.core import Budget, Context, Draft, Verdict
from outrider.runtime import HFModel, KVCache
from outrider.testing import SoftmaxDistribution
from outrider.verifiers import Rejection

VOCAB = 5
LENGTHS = [4, 9, 1, 4]
BUDGET = Budget(12, torch.tensor([12, 5, 8, 2]))


def round_(
    model: HFModel, cache: KVCache, draft: Draft, merge: bool
) -> tuple[torch.Tensor, Verdict]:
    """Scores, verifies and commits a draft whose siblings may, or may not, share columns."""
    context = cache.context
    scored = draft if merge else replace(draft, drawn="distinct")
    logits_BNV = model.score(cache, scored).logits_BNV
    verdict = Rejection()(draft, logits_BNV.double().softmax(-1), context.rng).read()
    model.commit(cache, scored, verdict)
    context.append(verdict.emitted(draft), verdict.num_emitted)
    return logits_BNV, verdict


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_equals_a_pass_over_all_nodes(family: str) -> None:
    """Logits within 1e-5 of the largest in float32, verdicts and texts equal, over ten rounds in
    which rows of different lengths accept different numbers of tokens."""
    model, drafter = tiny(family, vocab_size=VOCAB), UniformDrafter(VOCAB, width=3)
    contexts = [
        Context.start(ragged_prompts(LENGTHS, VOCAB), SoftmaxDistribution(), [0] * 4, range(4))
        for _ in range(2)
    ]
    saved = 0
    with torch.inference_mode():
        caches = [model.start(context) for context in contexts]
        for _ in range(10):
            draft = drafter.propose(NoMemory(), contexts[0], BUDGET, contexts[0].rng)
            merged, whole = (
                round_(model, cache, draft, merge)
                for cache, merge in zip(caches, (True, False), strict=True)
            )
            saved += draft.num_nodes - draft.query_tokens.node_BQ.shape[1]
            off_BN = (merged[0] - whole[0]).abs().amax(2)[draft.mask_BN]
            assert float(off_BN.max()) <= 1e-5 * float(whole[0].abs().max())
            assert contexts[0].lengths == contexts[1].lengths
            for b, length in enumerate(contexts[0].lengths):
                texts = [context.tokens_BT[b, :length].tolist() for context in contexts]
                assert texts[0] == texts[1]
    assert saved > 0
    assert sum(contexts[0].lengths) > sum(LENGTHS) + 50
