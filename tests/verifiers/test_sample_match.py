"""Sample and match: the distribution, how much it accepts, and mutants of its own."""

import pytest
import torch
from torch import Tensor

from outrider.core import Draft, Role, Stream, Verdict, candidates_equal, draw, match
from outrider.testing import ToyDrafter, ToyModel, check_verifier, chi2, enumerate_round
from outrider.verifiers import SampleMatch

TARGET, GUESS = ToyModel.random(3, seed=1), ToyModel.random(3, seed=2)


def test_contract() -> None:
    found = check_verifier(SampleMatch(), accepts_own_distribution=False)
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("drafter", ["model", "chosen", "distinct", "confidence"])
def test_lossless_by_enumeration(drafter: str) -> None:
    drafters = {
        "model": ToyDrafter(GUESS),
        "chosen": ToyDrafter(GUESS, drawn="chosen"),
        "distinct": ToyDrafter(GUESS, 2, "distinct"),
        "confidence": ToyDrafter(GUESS, confidence=0.4),
    }
    num_tokens = 2 if drafter == "distinct" else 3
    distribution = enumerate_round(TARGET, drafters[drafter], SampleMatch(), num_tokens)
    assert distribution.total_variation < 1e-12


def test_accepts_with_the_probability_that_both_draw_the_same() -> None:
    target, guess = (
        ToyModel(logits_V[None].double().log_softmax(-1), order=0)
        for logits_V in torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    )
    same = float((target.table_EV.softmax(-1) * guess.table_EV.softmax(-1)).sum())
    distribution = enumerate_round(target, ToyDrafter(guess), SampleMatch(), 1)
    assert distribution.acceptance_length == pytest.approx(1 + same, abs=1e-12)


@pytest.mark.slow
def test_the_real_sampler_has_the_distribution() -> None:
    """False alarm with probability 1e-4."""
    assert chi2(TARGET, ToyDrafter(GUESS), SampleMatch(), 3) > 1e-4


class RedrawnWhenDifferent(SampleMatch):
    """Wrong: draws again from p where the tokens differ."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        verdict = super().__call__(draft, p_BNV, rng)
        rows_B = torch.arange(p_BNV.shape[0])
        again_B = draw(p_BNV[rows_B, verdict.num_accepted_B], rng.uniform(Role.NOISE, 1)[:, 0])
        rejected_B = verdict.num_accepted_B < draft.num_drafted_B
        next_B = torch.where(rejected_B, again_B, verdict.next_token_B)
        return Verdict(verdict.path_BD, verdict.num_accepted_B, next_B)


class OneNumberForAll(SampleMatch):
    """Wrong: all positions share one random number."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        u_BN = rng.uniform(Role.NEXT, 1).expand_as(draft.tokens_BN)
        y_BN = draw(p_BNV.flatten(0, 1), u_BN.flatten()).view_as(draft.tokens_BN)
        return match(draft, candidates_equal(draft, y_BN), y_BN)


@pytest.mark.parametrize("mutant", [RedrawnWhenDifferent(), OneNumberForAll()])
def test_mutants_are_rejected(mutant: SampleMatch) -> None:
    assert enumerate_round(TARGET, ToyDrafter(GUESS), mutant, 3).total_variation > 1e-3
