"""CHI2: the test itself, and the real sampler over many rounds."""

import pytest
import torch
from scipy import stats

from outrider.sampling import Sampling, Warp
from outrider.testing import ToyDrafter, ToyModel, chi2, chi2_p_value, greedy_distribution
from outrider.verifiers import Greedy, Rejection

TARGET = ToyModel.random(3, seed=1)
GUESS = ToyModel.random(3, seed=2)


def test_p_value_is_scipys():
    counts_C = torch.tensor([18, 55, 27, 100])
    probs_C = torch.tensor([0.1, 0.25, 0.15, 0.5]).double()
    expected = stats.chisquare(counts_C.numpy(), (200 * probs_C).numpy()).pvalue
    assert chi2_p_value(counts_C, probs_C) == pytest.approx(float(expected), rel=1e-6)


def test_small_cells_are_pooled():
    counts_C = torch.tensor([500, 480, 8, 7, 5])
    probs_C = torch.tensor([0.49, 0.49, 0.008, 0.007, 0.005]).double()
    expected = stats.chisquare([500, 480, 20], [490, 490, 20]).pvalue
    assert chi2_p_value(counts_C, probs_C) == pytest.approx(float(expected), rel=1e-6)


def test_a_small_pool_joins_a_neighbour():
    counts_C, probs_C = torch.tensor([60, 37, 3]), torch.tensor([0.6, 0.38, 0.02]).double()
    expected = stats.chisquare([60, 40], [60, 40]).pvalue
    assert chi2_p_value(counts_C, probs_C) == pytest.approx(float(expected), rel=1e-6)


def test_a_count_in_an_impossible_cell_gives_zero():
    assert chi2_p_value(torch.tensor([999, 1]), torch.tensor([1.0, 0.0])) == 0


def test_a_single_possible_outcome_gives_one():
    assert chi2_p_value(torch.tensor([1000, 0]), torch.tensor([1.0, 0.0])) == 1


@pytest.mark.parametrize(
    ("drafter", "num_tokens"),
    [
        (ToyDrafter(GUESS), 3),
        (ToyDrafter(GUESS, confidence=0.4), 3),
        (ToyDrafter(GUESS, 1, "chosen"), 2),
        (ToyDrafter(GUESS, 2), 3),
        (ToyDrafter(GUESS, 2, "chosen"), 3),
    ],
    ids=["iid chain", "confident chain", "chosen chain", "iid tree", "chosen tree"],
)
def test_rejection_has_the_targets_frequencies(drafter, num_tokens):
    """False-alarm probability 1e-4 per drafter (over the choice of the seed)."""
    assert chi2(TARGET, drafter, Rejection(), num_tokens) > 1e-4


@pytest.mark.slow
def test_rejection_has_the_warped_targets_frequencies():
    """False-alarm probability 1e-4. Penalties make the distribution depend on the drafted
    prefix."""
    sampling = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3)
    p_value = chi2(
        TARGET, ToyDrafter(GUESS), Rejection(), 3, distribution=lambda B: Warp([sampling] * B, 3)
    )
    assert p_value > 1e-4


def test_greedy_has_one_outcome():
    """No false alarms: the outcome is certain."""
    drafter = ToyDrafter(GUESS, 2, "chosen")
    assert chi2(TARGET, drafter, Greedy(), 3, distribution=greedy_distribution, num_rows=256) == 1
