"""Every wrong implementation in ``outrider.testing.mutants`` fails the checks named here.

A correct pair would fail a statistical check with probability below 1e-3. Seeds are fixed, and the
samples are much larger than the mistakes require.
"""

from typing import Any

import pytest

from outrider.lab.certify import Check, certify, rounds
from outrider.testing import SoftmaxDistribution, ToyDrafter, ToyModel, softmax_distribution
from outrider.testing import mutants as m

TARGET, GUESS = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)
CHAIN, SIBLINGS, DISTINCT = (
    ToyDrafter(GUESS),
    ToyDrafter(GUESS, 2),
    ToyDrafter(GUESS, 2, "distinct"),
)
REFERENCE = m.Reference()


def hot(num_rows: int) -> SoftmaxDistribution:
    return SoftmaxDistribution(temperature=0.5)


# checks that must fail, target, drafter, verifier, distribution
CAUGHT = [
    ({"positions", "rounds"}, TARGET, CHAIN, m.ResidualFromTarget(), softmax_distribution),
    ({"positions", "rounds"}, TARGET, CHAIN, m.NonStrict(), softmax_distribution),
    ({"rounds"}, TARGET, CHAIN, m.ShiftedDraftDistribution(), softmax_distribution),
    ({"rounds"}, TARGET, CHAIN, m.Reseeded(), softmax_distribution),
    ({"rounds"}, TARGET, CHAIN, m.BonusOmitted(), softmax_distribution),
    ({"rounds"}, TARGET, CHAIN, m.BonusFromResidual(), softmax_distribution),
    ({"rounds"}, TARGET, SIBLINGS, m.BestOfK(), softmax_distribution),
    ({"rounds"}, TARGET, SIBLINGS, m.SortedByDraftDistribution(), softmax_distribution),
    ({"rounds"}, TARGET, SIBLINGS, m.SortedByRatio(), softmax_distribution),
    ({"rounds"}, TARGET, SIBLINGS, m.DuplicatesRemoved(), softmax_distribution),
    ({"rounds"}, TARGET, DISTINCT, m.WithReplacementAssumed(), softmax_distribution),
    ({"rounds"}, TARGET, DISTINCT, m.UnrenormalisedDraftDistribution(), softmax_distribution),
    ({"drafts", "tokens", "outputs"}, TARGET, m.UnwarpedDraftDistribution(GUESS), REFERENCE, hot),
    (
        {"drafts", "tokens", "outputs"},
        TARGET,
        m.UnlikelyDropped(GUESS),
        REFERENCE,
        softmax_distribution,
    ),
    (
        {"drafts", "tokens", "outputs"},
        TARGET,
        m.TopKAsDraws(GUESS),
        REFERENCE,
        softmax_distribution,
    ),
    (
        {"tokens", "outputs"},
        TARGET,
        m.RetrospectiveSearch(GUESS),
        REFERENCE,
        softmax_distribution,
    ),
    (
        {"states", "tokens", "outputs"},
        m.EntryNotRolledBack(TARGET.table_EV),
        CHAIN,
        REFERENCE,
        softmax_distribution,
    ),
]


def culprit(target: Any, drafter: Any, verifier: Any) -> str:
    wrong = [x for x in (target, drafter, verifier) if type(x).__doc__.startswith("Wrong")]
    return type(wrong[0]).__name__


@pytest.mark.parametrize(
    ("failing", "target", "drafter", "verifier", "distribution"),
    CAUGHT,
    ids=[culprit(*row[1:4]) for row in CAUGHT],
)
def test_a_mutant_is_caught(
    failing: set[str],
    target: Any,
    drafter: Any,
    verifier: Any,
    distribution: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = "outputs" in failing
    if counts:  # the rule is correct, so skip its enumeration, which takes long
        monkeypatch.setattr(rounds, "check", lambda *_: Check.skipped("rounds", "left out"))
    certificate = certify(
        target,
        drafter,
        verifier,
        [[0, 1], [2, 1, 1]],
        distribution,
        2,
        num_samples=3000 if counts else 0,
        length=3,
        num_positions=32,
        batch_size=2000,
    )
    failed = {check.name for check in certificate.checks if check.passed is False}
    assert failing <= failed
    assert not certificate.passed
    assert certificate.verdict.startswith("NOT LOSSLESS: ")


def test_a_wrong_tree_rule_is_caught_although_the_drafter_makes_chains() -> None:
    certificate = certify(
        TARGET,
        CHAIN,
        m.BestOfK(),
        [[0, 1]],
        softmax_distribution,
        2,
        num_samples=0,
        num_positions=16,
    )
    (failed,) = [check for check in certificate.checks if check.passed is False]
    assert failed.name == "rounds"
    assert "siblings" in failed.words


UNREACHED = {"ReadsPastTheEnd", "ReadsMissingNodes"}
"""These are wrong only if the distribution of a missing node, or of one after an end token, is NaN.
That does not occur in a certificate; ``check_verifier`` catches them."""


def test_every_mutant_is_in_the_table() -> None:
    named = {
        name
        for name, value in vars(m).items()
        if isinstance(value, type)
        and value.__module__ == m.__name__
        and (value.__doc__ or "").startswith("Wrong")
    }
    assert named - UNREACHED == {culprit(*row[1:4]) for row in CAUGHT}
    assert named > UNREACHED
