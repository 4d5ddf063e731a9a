"""The full contract, including ENUM, with one table row per rule."""

import pytest
import torch

from outrider import verifiers
from outrider.core import Draft, Stream, check_compatible
from outrider.core.errors import IncompatibleError
from outrider.testing import (
    ToyDrafter,
    ToyModel,
    check_verifier,
    enumerate_round,
    sample_rounds,
    softmax_distribution,
    target_distribution,
)
from outrider.testing.enumerate import greedy_distribution
from outrider.verifiers import Block, Greedy, Rejection, SampleMatch

VERIFIERS = [Rejection(), Greedy()]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda v: type(v).__name__)
def test_contract(verifier):
    found = check_verifier(verifier)
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("drafter", ["model", "chosen", "confidence"])
@pytest.mark.parametrize(
    "verifier", [Rejection(), Greedy(), Block(), SampleMatch()], ids=lambda v: type(v).__name__
)
def test_every_lossless_rule_by_enumeration(verifier, drafter):
    """``Coupled``, whose noise cannot be scripted, has its own proof in test_coupled.py."""
    target, guess = ToyModel.random(3, seed=21), ToyModel.random(3, seed=22)
    drafters = {
        "model": ToyDrafter(guess),
        "chosen": ToyDrafter(guess, drawn="chosen"),
        "confidence": ToyDrafter(guess, confidence=0.4),
    }
    distribution = softmax_distribution if verifier.needs == "distribution" else greedy_distribution
    assert (
        enumerate_round(
            target, drafters[drafter], verifier, 3, distribution=distribution
        ).total_variation
        < 1e-12
    )


def test_incompatible_drafts_are_an_error():
    drafter = ToyDrafter(ToyModel.random(3), 2, "distinct")
    with pytest.raises(IncompatibleError, match="cannot verify 'distinct'"):
        check_compatible(drafter, Rejection())
    check_compatible(drafter, Greedy())


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("drawn", ["iid", "distinct", "chosen"])
def test_greedy_is_plain_greedy_over_many_rounds(width, drawn):
    """Token for token, with a good, a bad and a perfect draft."""
    target = ToyModel.random(4, seed=1)
    prompt, length = (0, 1, 2), 24
    plain = sample_rounds(
        target, ToyDrafter(target), Greedy(), 0, length=length, num_rows=1, prompt=prompt
    )
    for guess in (target, ToyModel.random(4, seed=1, scale=1.0), ToyModel.random(4, seed=9)):
        drafter = ToyDrafter(guess, width, drawn)
        tokens_BK = sample_rounds(
            target,
            drafter,
            Greedy(),
            4,
            length=length,
            num_rows=5,
            prompt=prompt,
            row_tokens=torch.arange(5),
            distribution=greedy_distribution,
        )
        assert (tokens_BK == plain).all()


def test_sampling_from_a_certain_target_is_certain():
    certain = ToyModel.random(3, seed=4, num_impossible=2)
    probs_S = target_distribution(certain, (0,), 3)
    tokens_BK = sample_rounds(
        certain,
        ToyDrafter(ToyModel.random(3, seed=5)),
        Rejection(),
        3,
        length=3,
        num_rows=64,
        prompt=(0,),
    )
    assert (tokens_BK == tokens_BK[0]).all()
    assert float(probs_S.max()) == 1


RULES = [
    rule
    for rule in (getattr(verifiers, name) for name in verifiers.__all__)
    if isinstance(rule, type) and getattr(rule, "needs", "") == "distribution"
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_without_a_drafted_token_the_next_one_is_the_targets(rule):
    """Drafters that draft nothing in a round give a root without any distributions."""
    p_BNV = torch.zeros(2, 1, 5)
    p_BNV[0, 0, 3] = p_BNV[1, 0, 1] = 1
    draft = Draft.root_only(torch.tensor([0, 4]))
    verdict = rule()(draft, p_BNV, Stream(torch.tensor([7, 8]), torch.tensor([0, 3])))
    assert verdict.next_token_B.tolist() == [3, 1]
    assert verdict.num_accepted_B.tolist() == [0, 0]
