"""CHI2 end to end: the output has the distribution computed by full forward passes.

Legend: S two-token continuations, B rows, V vocabulary.
"""

import pytest
import torch
from tiny_models import engine_of, full_logits, tiny
from torch import Tensor

from outrider import Sampling
from outrider.core import Context, Distribution, Prefix
from outrider.drafters import ModelDrafter
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import chi2_p_value, sample_rounds
from outrider.verifiers import Rejection

V = 5
PROMPT = [3, 1, 4, 1]
SAMPLINGS = [
    Sampling(max_new_tokens=2, ignore_eos=True),
    Sampling(max_new_tokens=2, ignore_eos=True, temperature=0.7, top_p=0.95, frequency_penalty=0.8),
]


def model(seed: int) -> HFModel:
    """A tiny model; with seeds 0 and 1, some drafts are accepted and some rejected."""
    return tiny(
        "llama",
        seed,
        vocab_size=V,
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        std=0.4,
    )


def exact(target: HFModel, sampling: Sampling) -> Tensor:
    """Probability of each two-token continuation, from plain forward passes, (S,)."""

    def distribution(new: list[int]) -> Tensor:
        context = Context.start([PROMPT], Warp([sampling], V), [0], [0])
        logits_V = full_logits(target.module, PROMPT + new)[-1]
        prefix = Prefix.of_chain(context, [torch.tensor([x]) for x in new])
        p_BMV: Tensor = context.distribution(logits_V[None, None], prefix)
        return p_BMV[0, 0].double()

    first_V = distribution([])
    return torch.cat([first_V[x] * distribution([x]) for x in range(V)])


def counts(tokens_BK: Tensor) -> Tensor:
    """How often each two-token continuation occurs, (S,)."""
    return torch.bincount(V * tokens_BK[:, 0] + tokens_BK[:, 1], minlength=V * V)


def check(counts_S: Tensor, sampling: Sampling) -> None:
    assert chi2_p_value(counts_S, exact(model(0), sampling)) > 1e-4
    assert chi2_p_value(counts_S, exact(model(1), sampling)) < 1e-4, "it must be able to fail"


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "warped"])
def test_rounds_of_a_real_pair(sampling: Sampling) -> None:
    """200,000 rows in batches of 25,000. With γ = 1, the two tokens come from one round or two.

    A correct method fails with probability 1e-4 per case over the choice of the seed, which is
    fixed.
    """
    target, drafter = model(0), ModelDrafter(model(1), V)

    def distribution(num_rows: int) -> Distribution:
        return Warp([sampling] * num_rows, V)

    counts_S = torch.zeros(V * V, dtype=torch.int64)
    with torch.inference_mode():
        for seed in range(8):
            tokens_BK = sample_rounds(
                target,
                drafter,
                Rejection(),
                1,
                length=2,
                num_rows=25_000,
                prompt=PROMPT,
                distribution=distribution,
                seed=seed,
            )
            counts_S += counts(tokens_BK)
    assert int(counts_S.sum()) == 200_000
    check(counts_S, sampling)


@pytest.mark.slow
def test_the_engine_end_to_end() -> None:
    """10,000 equal prompts that share a batch of 2,500 rows.

    A correct engine fails with probability 1e-4 over the choice of the seed, which is fixed.
    """
    engine = engine_of(model(0), model(1), γ=2, max_batch_size=2_500)
    sampling = SAMPLINGS[1]
    results = engine.generate([PROMPT] * 10_000, sampling)
    assert 0.1 < results.stats.acceptance_rate < 0.95
    check(counts(torch.tensor([result.token_ids for result in results])), sampling)
