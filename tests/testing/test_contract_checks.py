"""Contract checks: correct toys pass, and each violated guarantee is named."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from outrider.core import Capabilities, Draft, Drawn, Scores, Verdict
from outrider.testing import (
    SoftmaxDistribution,
    ToyDrafter,
    ToyModel,
    check_drafter,
    check_model,
    check_verifier,
    enumerate_round,
)
from outrider.testing import mutants as m
from outrider.verifiers import Rejection

GUESS = ToyModel.random(3, seed=2)


@pytest.mark.parametrize("order", [None, 0, 1, 3])
def test_toy_models_meet_the_contract(order):
    check_model(ToyModel.random(3, order, seed=3), 3)


def test_toy_models_with_impossible_tokens_meet_the_contract():
    check_model(ToyModel.random(4, seed=3, num_impossible=2), 4)


@pytest.mark.parametrize("drawn", ["iid", "distinct", "chosen", "searched"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_toy_drafters_meet_the_contract(width, drawn):
    """False-alarm probability below 1e-6 per case."""
    check_drafter(ToyDrafter(GUESS, width, drawn), 3)


@pytest.mark.parametrize(
    "distribution", [SoftmaxDistribution(greedy=True), SoftmaxDistribution(temperature=0.5)]
)
def test_toy_drafters_meet_the_contract_under_other_distributions(distribution):
    """False-alarm probability below 1e-6 per case."""
    check_drafter(ToyDrafter(GUESS, confidence=0.4), 3, distribution=lambda B: distribution)


class BrokenDrafter(ToyDrafter):
    def __init__(self, broken):
        super().__init__(GUESS, 2)
        self.broken = broken

    def propose(self, state, context, budget, rng):
        draft = super().propose(state, context, budget, rng)
        tokens_BN, parents_BN, mask_BN = draft.tokens_BN, draft.parents_BN, draft.mask_BN
        match self.broken:
            case "root":
                return replace(draft, tokens_BN=(tokens_BN + 1) % 3)
            case "order":
                return replace(draft, parents_BN=parents_BN.clamp(min=-1) + 3 * (parents_BN == 1))
            case "orphan":
                gone_BN = torch.arange(mask_BN.shape[1]) == 1
                return replace(draft, mask_BN=mask_BN & ~gone_BN)
            case "range":
                first_BN = torch.arange(mask_BN.shape[1]) == 1
                return replace(draft, tokens_BN=tokens_BN + 3 * first_BN)
            case "row budget":
                return replace(draft, mask_BN=torch.ones_like(mask_BN))
            case "sum":
                return replace(draft, probs_BNV=draft.probs_BNV * 1.1)
            case "drawn":
                return replace(draft, drawn="distinct")
            case "chain":
                return replace(draft, is_chain=True)
        return draft


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("root", "node 0 is not the last token"),
        ("order", "topological order"),
        ("orphan", "a node exists whose parent does not"),
        ("range", "out of range"),
        ("row budget", "exceeds its own budget"),
        ("sum", "does not sum to one"),
        ("drawn", "the draft declares 'distinct'"),
        ("chain", "the draft is not a chain"),
    ],
)
def test_a_malformed_draft_is_named(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_drafter(BrokenDrafter(broken), 3)


class OverBudget(ToyDrafter):
    def propose(self, state, context, budget, rng):
        return super().propose(state, context, replace(budget, max_tokens=9), rng)


class Forgetful(ToyDrafter):
    def commit(self, state, draft, verdict, scores):
        pass


class BatchDependent(ToyDrafter):
    def propose(self, state, context, budget, rng):
        state = replace(state, past_B=state.past_B + context.num_rows)
        return super().propose(state, context, budget, rng)


class KeepsWrongRows(ToyDrafter):
    def join(self, state, other):
        state.past_B = torch.cat([other.past_B, state.past_B])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OverBudget, "exceed"),
        (Forgetful, "after commit"),
        (BatchDependent, "than in its batch"),
        (KeepsWrongRows, "keep or join"),
    ],
)
def test_a_drafter_with_a_wrong_state_is_named(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_drafter(kind(GUESS), 3)


class UndeclaredTree(ToyDrafter):
    def __init__(self, model):
        super().__init__(model, 2)

    capabilities = Capabilities()


class TooFewNodes(ToyDrafter):
    capabilities = Capabilities(max_nodes=lambda num_tokens: num_tokens)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (UndeclaredTree, "a tree, where the capabilities declare chains"),
        (TooFewNodes, "5 nodes, where the capabilities declare at most 4"),
    ],
)
def test_drafts_beyond_the_declared_capabilities_are_named(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_drafter(kind(GUESS), 3)


class SiblingsSeen(ToyModel):
    """Wrong: a tree without a mask, where each node attends to the preceding node."""

    def score(self, cache, draft):
        chain = Draft.chain(draft.tokens_BN, draft.mask_BN, None, "chosen")
        return super().score(cache, chain)


class JoinsInFront(ToyModel):
    def join(self, cache, other):
        cache.past_B = torch.cat([other.past_B, cache.past_B])


class NotANumber(ToyModel):
    def score(self, cache, draft):
        return Scores(super().score(cache, draft).logits_BNV * torch.nan)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SiblingsSeen, "scores of a tree after start"),
        (JoinsInFront, "after keep and join"),
        (NotANumber, "NaN"),
        (m.EntryNotRolledBack, "after 1 commits"),
    ],
)
def test_a_broken_model_is_named(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_model(kind(ToyModel.random(3, seed=3).table_EV), 3)


def test_commit_without_score_is_an_error():
    model = ToyModel.random(3)
    from outrider.testing import ToyCache

    draft = Draft.root_only(torch.tensor([0]))
    nothing = torch.zeros(1, dtype=torch.int64)
    verdict = Verdict(draft.tokens_BN[:, :0], nothing, nothing).read()
    with pytest.raises(RuntimeError, match="commit without score"):
        model.commit(ToyCache(nothing), draft, verdict)


@dataclass(frozen=True)
class AcceptsSearches(Rejection):
    """Wrong: treats the result of a search as a draw."""

    accepts: ClassVar[frozenset[Drawn]] = frozenset({"searched"})


def test_a_lossless_rule_that_accepts_searches_is_named():
    with pytest.raises(AssertionError, match=r"claims to be lossless.*searched chain"):
        check_verifier(AcceptsSearches())


class TakesAll(Rejection):
    def accept(self, p_V, q_V, x, u):
        return u < 2


def test_the_toy_search_is_beam_sampling_of_width_one():
    """The more probable of two draws without replacement, by hand for q = (1/2, 1/3, 1/6): the
    second token wins if it is drawn with the third, in either order."""
    toy = ToyModel(torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64).log(), order=0)
    done = enumerate_round(toy, ToyDrafter(toy, 1, "searched"), TakesAll(), 1, prompt=(0,))
    second = 1 / 3 * (1 / 6) / (1 - 1 / 3) + 1 / 6 * (1 / 3) / (1 - 1 / 6)
    for token, mass in enumerate((1 - second, second, 0.0)):
        found = sum(m for tokens, m in done.emitted.items() if tokens[0] == token)
        assert found == pytest.approx(mass, abs=1e-12)
