"""MUT: every wrong implementation is rejected, by the check named in its row."""

import pytest
import torch

from outrider.core import Context
from outrider.testing import (
    SoftmaxDistribution,
    ToyDrafter,
    ToyModel,
    check_drafter,
    check_model,
    check_verifier,
    chi2,
    enumerate_round,
)
from outrider.testing import mutants as m

TARGET = ToyModel.random(3, seed=32)
GUESS = ToyModel.random(3, seed=33)
CHAIN = ToyDrafter(GUESS)
SIBLINGS = ToyDrafter(GUESS, 2)
DISTINCT = ToyDrafter(GUESS, 2, "distinct")
SEARCHED = ToyDrafter(GUESS, 1, "searched")


def hot(num_rows):
    return SoftmaxDistribution(temperature=0.5)


def plain(num_rows):
    return SoftmaxDistribution()


REFERENCE = m.Reference()
# error, drafter, verifier, distribution, minimum total variation that ENUM must find
REJECTED_BY_ENUM = [
    ("residual from p", CHAIN, m.ResidualFromTarget(), plain, 0.02),
    ("q shifted by one position", CHAIN, m.ShiftedDraftDistribution(), plain, 0.02),
    ("same u everywhere", CHAIN, m.Reseeded(), plain, 0.002),
    ("bonus from the residual", CHAIN, m.BonusFromResidual(), plain, 0.02),
    ("best of K", SIBLINGS, m.BestOfK(), plain, 0.02),
    ("draws sorted by q", SIBLINGS, m.SortedByDraftDistribution(), plain, 0.02),
    ("draws sorted by p/q", SIBLINGS, m.SortedByRatio(), plain, 0.02),
    ("repeated draws removed", SIBLINGS, m.DuplicatesRemoved(), plain, 0.005),
    ("a search called draws", SEARCHED, REFERENCE, plain, 0.02),
    ("top-k called draws", m.TopKAsDraws(GUESS), REFERENCE, plain, 0.1),
    ("distinct verified as iid", DISTINCT, m.WithReplacementAssumed(), plain, 0.005),
    ("q not renormalised", DISTINCT, m.UnrenormalisedDraftDistribution(), plain, 0.005),
    ("q not warped", m.UnwarpedDraftDistribution(GUESS), REFERENCE, hot, 0.02),
    ("length best in hindsight", m.RetrospectiveSearch(GUESS), REFERENCE, plain, 0.05),
    ("unlikely token dropped", m.UnlikelyDropped(GUESS), REFERENCE, plain, 0.02),
]
IDS = [row[0] for row in REJECTED_BY_ENUM]


@pytest.mark.parametrize(
    ("_", "drafter", "verifier", "distribution", "least"), REJECTED_BY_ENUM, ids=IDS
)
def test_enum_rejects(_, drafter, verifier, distribution, least):
    assert (
        enumerate_round(TARGET, drafter, verifier, 2, distribution=distribution).total_variation
        > least
    )


@pytest.mark.parametrize(
    ("drafter", "verifier", "distribution"),
    [
        (CHAIN, REFERENCE, plain),
        (CHAIN, REFERENCE, hot),
        (SIBLINGS, REFERENCE, plain),
        (ToyDrafter(GUESS, confidence=0.35), REFERENCE, plain),
        (m.StoppedByPeaks(GUESS), REFERENCE, plain),
        (m.StoppedByPeaks(GUESS, (1.0, 1.5, 1.8)), REFERENCE, plain),
        (ToyDrafter(GUESS, 2, "chosen"), REFERENCE, plain),
        (DISTINCT, m.WithoutReplacement(), plain),
        (ToyDrafter(GUESS, 3, "distinct"), m.WithoutReplacement(), plain),
    ],
)
def test_enum_passes_the_controls(drafter, verifier, distribution):
    assert (
        enumerate_round(TARGET, drafter, verifier, 2, distribution=distribution).total_variation
        < 1e-12
    )


def test_enum_rejects_an_omitted_bonus_by_the_acceptance_length():
    """The distribution is right, but a draft from the target's own distribution yields 2 tokens
    instead of 3."""
    result = enumerate_round(TARGET, ToyDrafter(TARGET), m.BonusOmitted(), 2)
    assert result.total_variation < 1e-12
    assert result.acceptance_length == pytest.approx(2, abs=1e-12)


REJECTED_BY_CHECK_VERIFIER = [
    (m.ResidualFromTarget(), "off by"),
    (m.NonStrict(), "never emits"),
    (m.ShiftedDraftDistribution(), "3 tokens and a bonus"),
    (m.Reseeded(), "off by"),
    (m.BonusOmitted(), "3 tokens and a bonus"),
    (m.BonusFromResidual(), "off by"),
    (m.BestOfK(), "off by"),
    (m.DuplicatesRemoved(), "off by"),
    (m.WithReplacementAssumed(), "off by"),
    (m.UnrenormalisedDraftDistribution(), "off by"),
    (m.ReadsPastTheEnd(), "after the end"),
    (m.ReadsMissingNodes(), "of nodes that do not exist"),
]


@pytest.mark.parametrize(
    ("mutant", "broken"),
    REJECTED_BY_CHECK_VERIFIER,
    ids=lambda x: type(x).__name__ if isinstance(x, m.Reference) else "",
)
def test_check_verifier_rejects(mutant, broken):
    with pytest.raises(AssertionError, match=broken):
        check_verifier(mutant)


@pytest.mark.parametrize(
    ("mutant", "distribution"),
    [
        (m.UnwarpedDraftDistribution(GUESS), hot),
        (m.UnlikelyDropped(GUESS), plain),
        (m.TopKAsDraws(GUESS), plain),
    ],
    ids=lambda x: type(x).__name__,
)
def test_check_drafter_rejects(mutant, distribution):
    with pytest.raises(AssertionError, match="not drawn from the declared probs"):
        check_drafter(mutant, 3, distribution=distribution)


def test_check_model_rejects_an_entry_that_is_not_rolled_back():
    with pytest.raises(AssertionError, match="after 1 commits differ"):
        check_model(m.EntryNotRolledBack(TARGET.table_EV), 3)


@pytest.mark.parametrize(
    ("target", "drafter", "verifier"),
    [
        (TARGET, CHAIN, m.ResidualFromTarget()),
        (TARGET, CHAIN, m.Reseeded()),
        (TARGET, SIBLINGS, m.BestOfK()),
        (m.EntryNotRolledBack(TARGET.table_EV), CHAIN, REFERENCE),
    ],
    ids=["residual from p", "same u everywhere", "best of K", "entry not rolled back"],
)
def test_chi2_rejects(target, drafter, verifier):
    """A correct method would be rejected with probability 1e-10."""
    assert chi2(target, drafter, verifier, 2, length=3) < 1e-10


def test_control_passes_chi2():
    """False-alarm probability 1e-4."""
    assert chi2(TARGET, CHAIN, REFERENCE, 2, length=3) > 1e-4


def test_every_mutant_is_in_a_table():
    named = {
        name
        for name, value in vars(m).items()
        if isinstance(value, type)
        and value.__module__ == m.__name__
        and (value.__doc__ or "").startswith("Wrong")
    }
    killed = {type(x).__name__ for row in REJECTED_BY_ENUM for x in row}
    killed |= {type(mutant).__name__ for mutant, _ in REJECTED_BY_CHECK_VERIFIER}
    assert named == (killed & named) | {"EntryNotRolledBack"}


def test_non_strict_mutant_differs_only_at_zero():
    """Frequencies therefore cannot reveal it; the check at u = 0 does."""
    context = Context.start([[0]], SoftmaxDistribution(), [0], [0])
    assert context.num_rows == 1
    p_V = torch.tensor([0.0, 1.0]).double()
    x, u = torch.tensor(0), torch.tensor(0.0).double()
    assert m.NonStrict().accept(p_V, None, x, u)
    assert not REFERENCE.accept(p_V, None, x, u)
    assert not m.NonStrict().accept(p_V, None, x, u + 2.0**-52)
