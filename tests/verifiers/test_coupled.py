"""The coupling: the output of plain decoding, token for token, and hence its distribution.

ENUM cannot script noise keyed by position (an argmax over noisy scores is not a threshold). The
proof has two parts instead: the distribution of plain decoding, which is one race per token, and
equality with plain decoding for any draft.

Legend: B rows, K tokens.
"""

from collections.abc import Sequence

import pytest
import torch
from tiny_models import engine_of, ragged_prompts, tiny, token_ids
from torch import Tensor

from outrider import Sampling
from outrider.core import Draft, Stream, Verdict, candidates_equal, match, race
from outrider.testing import ToyDrafter, ToyModel, chi2, sample_rounds
from outrider.verifiers import Coupled

TARGET = ToyModel.random(4, seed=1)
GUESSES = {
    "good": ToyDrafter(ToyModel.random(4, seed=1, scale=1.0)),
    "perfect": ToyDrafter(TARGET),
    "bad": ToyDrafter(ToyModel.random(4, seed=9)),
    "chosen": ToyDrafter(ToyModel.random(4, seed=9), 1, "chosen"),
    "confident": ToyDrafter(ToyModel.random(4, seed=9), confidence=0.5),
    "siblings": ToyDrafter(ToyModel.random(4, seed=9), 2, "distinct"),
}


def emitted_tokens(
    drafter: ToyDrafter, rule: Coupled, num_tokens: int, num_rows: int = 2000
) -> Tensor:
    return sample_rounds(TARGET, drafter, rule, num_tokens, length=8, num_rows=num_rows)


@pytest.mark.parametrize("guess", GUESSES)
def test_any_draft_gives_the_output_of_plain_decoding(guess: str) -> None:
    plain_BK = emitted_tokens(GUESSES["bad"], Coupled(), 0)
    assert (emitted_tokens(GUESSES[guess], Coupled(), 3) == plain_BK).all()
    assert len(plain_BK.unique(dim=0)) > 1000  # and the rows differ from each other


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_the_real_sampler_has_the_distribution(num_tokens: int) -> None:
    """False alarm with probability 1e-4 each."""
    assert chi2(TARGET, GUESSES["bad"], Coupled(), num_tokens, length=3) > 1e-4


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=3),
        Sampling(temperature=0.6, top_p=0.9, max_new_tokens=20, ignore_eos=True),
        Sampling(temperature=1.5, top_k=8, repetition_penalty=1.2, max_new_tokens=20),
        Sampling(temperature=0, max_new_tokens=20, ignore_eos=True),
    ],
    ids=["plain", "cold", "penalised", "greedy"],
)
def test_method_coupled_equals_method_plain(sampling: Sampling) -> None:
    """Real transformers in float64, ragged batches, any γ and batch size."""
    target, near = tiny("llama", 0, dtype=torch.float64), tiny("llama", 5, dtype=torch.float64)
    prompts = ragged_prompts([5, 1, 9, 3])
    plain = token_ids(engine_of(target).generate(prompts, sampling))
    for draft in (near, target):
        for γ, size in ((1, 4), (5, 2)):
            engine = engine_of(target, draft, "coupled", γ, max_batch_size=size)
            assert token_ids(engine.generate(prompts, sampling)) == plain


def test_a_draft_that_shares_the_noise_is_kept_more_often() -> None:
    """As its own draft, a model is fully accepted; of independent draws a fraction Σ p² is."""
    target = tiny("llama", 0, dtype=torch.float64)
    sampling = Sampling(max_new_tokens=30, ignore_eos=True)

    def kept(method: str) -> float:
        engine = engine_of(target, target, method, 5)
        return engine.generate(ragged_prompts([4, 4]), sampling).stats.acceptance_rate

    assert kept("coupled") == 1
    assert kept("sample-match") < 0.5


class KeyedByRound(Coupled):
    """Wrong: all positions of a round use the noise of its first position."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        key_BN = rng.key_B[:, None].expand_as(draft.tokens_BN)
        position_BN = rng.position_B[:, None].expand_as(draft.tokens_BN)
        y_BN = race(p_BNV.flatten(0, 1), Stream(key_BN.flatten(), position_BN.flatten()))
        y_BN = y_BN.view_as(draft.tokens_BN)
        return match(draft, candidates_equal(draft, y_BN), y_BN)


def test_a_mutant_is_rejected_by_both_proofs() -> None:
    drafter = GUESSES["perfect"]
    plain_BK: Sequence[Tensor] = emitted_tokens(drafter, Coupled(), 0)
    assert (emitted_tokens(drafter, KeyedByRound(), 3) != plain_BK).any()
    assert chi2(TARGET, drafter, KeyedByRound(), 3, length=3, num_rows=20_000) < 1e-4
