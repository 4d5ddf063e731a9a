"""Weights that change between rounds do not change what is generated.

Keys and values that older weights left in the draft's KV cache stay in use, so q is a distribution
that no single version has; the rule verifies the tokens against the q that they were drawn from.

Legend: B rows, S sequences, V vocabulary.
"""

from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from interpreted_graphs import interpreted, without_compiler
from online_helpers import Watching, disturbed
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny, token_ids
from torch import Tensor

from outrider import METHODS, Engine, Sampling
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.weights import StagedWeights, plain_weights, staged
from outrider.testing import chi2_p_value
from outrider.train.online import adaptable_methods


@dataclass
class Swapping(Watching):
    """Exchanges the weights before every round, in turn."""

    weights: list[StagedWeights] = field(default_factory=list)
    num_swaps: int = 0

    def before_round(self) -> None:
        self.weights[self.num_swaps % len(self.weights)].write()
        self.num_swaps += 1


def swapping(engine: Engine, others: list[HFModel]) -> Swapping:
    """The engine drafts with a copy of its draft, whose weights change before every round."""
    assert engine.draft is not None
    engine.adopt_draft(engine.draft.with_own_weights())
    module = engine.draft.module
    every = [staged(module, plain_weights(model.module)) for model in others]
    engine.observed.observer = observer = Swapping(weights=every)
    return observer


WITH_DRAFT_MODEL = [name for name in adaptable_methods() if METHODS[name].needs_draft]


@pytest.mark.parametrize("method", WITH_DRAFT_MODEL)
def test_greedy_outputs_are_plain_decodings_over_swaps(method: str) -> None:
    target = tiny()
    prompts = ragged_prompts([9, 4, 1])
    wanted = token_ids(engine_of(target).generate(prompts, greedy(30)))
    drafts = [disturbed(target, size) for size in (0.0, 0.15, 0.02, 1.0)]
    engine = engine_of(target, drafts[0], method)
    observer = swapping(engine, drafts)
    results = engine.generate(prompts, greedy(30))
    assert token_ids(results) == wanted
    assert observer.num_swaps > 8
    assert 0 < results.stats.accepted < results.stats.drafted


@pytest.mark.slow
def test_greedy_outputs_of_compiled_drafts_over_swaps() -> None:
    target = tiny()
    prompts = ragged_prompts([9, 4])
    wanted = token_ids(engine_of(target).generate(prompts, greedy(30)))
    draft = disturbed(target)
    draft.compiled = CompiledExecutor(draft.module, draft.spec, "graph", interpreted)
    engine = without_compiler(engine_of(target, draft))
    observer = swapping(engine, [disturbed(target, size) for size in (0.0, 0.15)])
    results = engine.generate(prompts, greedy(30))
    assert token_ids(results) == wanted
    assert observer.num_swaps > 5
    assert engine.draft is not None
    assert engine.draft.compiled is not None
    assert any(engine.draft.compiled._drafts), "a fused draft ran"


V, LENGTH = 5, 3
PROMPT = [3, 1, 4, 1]
SMALL = {
    "vocab_size": V,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "std": 0.4,
}


def exact(model: HFModel) -> Tensor:
    """Probability of each continuation of LENGTH tokens, from plain forward passes, (S,)."""
    probs = []
    for new in product(range(V), repeat=LENGTH):
        p_TV = full_logits(model.module, [*PROMPT, *new]).double().softmax(-1)
        first = len(PROMPT) - 1
        probs.append(torch.stack([p_TV[first + i, x] for i, x in enumerate(new)]).prod())
    return torch.stack(probs)


@pytest.mark.parametrize(
    ("method", "num_rows"),
    [
        ("speculative", 3000),
        pytest.param("speculative", 60_000, marks=pytest.mark.slow),
        pytest.param("block", 60_000, marks=pytest.mark.slow),
        pytest.param("specinfer", 60_000, marks=pytest.mark.slow),
    ],
)
def test_sampled_outputs_have_the_targets_distribution_over_swaps(
    method: str, num_rows: int
) -> None:
    """Requests of three tokens, whose draft's weights change before every round. A correct method
    fails with probability 1e-4 per case over the choice of the seed, which is fixed."""
    target = tiny(seed=0, **SMALL)
    drafts = [tiny(seed=seed, **SMALL) for seed in (1, 2, 0)]
    engine = engine_of(target, drafts[0], method, 2, max_batch_size=1000)
    observer = swapping(engine, drafts)
    sampling = Sampling(max_new_tokens=LENGTH, ignore_eos=True)
    counts_S = torch.zeros(V**LENGTH, dtype=torch.int64)
    for first in range(0, num_rows, 1000):
        numbers = range(first, first + 1000)
        results = engine.generate([PROMPT] * 1000, sampling, request_numbers=numbers)
        for tokens in token_ids(results):
            counts_S[sum(x * V ** (LENGTH - 1 - i) for i, x in enumerate(tokens))] += 1
    assert observer.num_swaps > num_rows // 600
    assert chi2_p_value(counts_S, exact(target)) > 1e-4
    assert chi2_p_value(counts_S, exact(drafts[0])) < 1e-4, "it must be able to fail"
