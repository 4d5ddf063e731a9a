"""The rule that emits a searched draft without verification.

Legend: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Stream, Verdict, row_keys
from outrider.core.errors import IncompatibleError
from outrider.testing import ToyCache, ToyDrafter, ToyModel, check_verifier, sample_rounds
from outrider.verifiers.commit import Commit

V = 3


def test_contract() -> None:
    check_verifier(Commit(), trees=False, keeps_support=False)


def emitted(rule: Commit, num_drafted: int) -> list[int]:
    """The tokens emitted for a draft 1, 2, 1, … by a target whose argmax is 0 everywhere."""
    tokens_BN = torch.tensor([[0, 1, 2, 1, 2]])
    mask_BN = torch.arange(5)[None] <= num_drafted
    probs_BNV = torch.full((1, 5, V), 1 / V)
    draft = Draft.chain(tokens_BN, mask_BN, probs_BNV, "searched")
    p_BNV = torch.tensor([0.8, 0.2, 0.0]).expand(1, 5, V)
    verdict = rule(draft, p_BNV, Stream(row_keys([0], [0], "cpu"), torch.tensor([1])))
    return verdict.emitted(draft)[0, : int(verdict.num_accepted_B) + 1].tolist()


def check_whole(rule: Commit) -> None:
    """All drafted tokens, even impossible ones, and no bonus; for an empty draft the argmax."""
    found = [emitted(rule, num) for num in range(5)]
    assert found == [[0], [1], [1, 2], [1, 2, 1], [1, 2, 1, 2]]


def test_all_of_a_draft_and_no_bonus() -> None:
    check_whole(Commit())


class Best(ToyDrafter):
    """The toy's argmax chain, declared as the result of a search."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__(model, 1, "chosen")

    def propose(self, state: ToyCache, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft, q_BNV = self.grow(state, context, budget, rng)
        return Draft.chain(draft.tokens_BN, draft.mask_BN, q_BNV, "searched")


def emitted_tokens(target: ToyModel, drafter: ToyDrafter, row_tokens: list[int]) -> Tensor:
    """The output of rows with their own budgets, over many rounds."""
    return sample_rounds(
        target,
        drafter,
        Commit(),
        max(row_tokens),
        length=12,
        num_rows=len(row_tokens),
        row_tokens=torch.tensor(row_tokens),
    )


def test_the_output_is_the_drafters() -> None:
    """For any budget; without a draft it is the target's argmax."""
    target, guess = ToyModel.random(V, seed=1), ToyModel.random(V, seed=2)
    drafted, own = (emitted_tokens(target, Best(model), [1, 2, 3, 4]) for model in (guess, target))
    assert (drafted == drafted[0]).all()
    assert (own == emitted_tokens(target, Best(guess), [0])).all()
    assert not (own == drafted).all()


def test_a_tree_is_an_error() -> None:
    tokens_BN = torch.zeros(1, 3, dtype=torch.int64)
    probs_BNV = torch.full((1, 3, 2), 0.5)
    draft = Draft(
        tokens_BN, torch.tensor([[-1, 0, 0]]), torch.ones(1, 3).bool(), probs_BNV, "searched"
    )
    rng = Stream(row_keys([0], [0], "cpu"), torch.tensor([1]))
    with pytest.raises(IncompatibleError, match="a single path"):
        Commit()(draft, probs_BNV, rng)


@dataclass(frozen=True)
class AddsABonus(Commit):
    """Wrong: the last candidate is accepted, and another token follows."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        done, last_B = super().__call__(draft, p_BNV, rng), draft.num_drafted_B
        return Verdict(done.path_BD, last_B, p_BNV[:, -1].argmax(-1))


@dataclass(frozen=True)
class ForgetsTheMask(Commit):
    """Wrong: rows with a smaller budget commit what they did not draft."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        everything_BN = torch.ones_like(draft.mask_BN)
        whole = Draft.chain(draft.tokens_BN, everything_BN, draft.probs_BNV, draft.drawn)
        return super().__call__(whole, p_BNV, rng)


@dataclass(frozen=True)
class TrustsTheTarget(Commit):
    """Wrong: the last token is the target's."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        done = super().__call__(draft, p_BNV, rng)
        return Verdict(done.path_BD, done.num_accepted_B, p_BNV[:, 0].argmax(-1))


@pytest.mark.parametrize("mutant", [AddsABonus(), ForgetsTheMask(), TrustsTheTarget()])
def test_mutants_are_rejected(mutant: Commit) -> None:
    with pytest.raises(AssertionError):
        check_whole(mutant)
