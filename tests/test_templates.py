"""The templates of docs/templates run, hold, and show how to prove a method with the public kit."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Stream
from outrider.testing import ToyModel, check_drafter, check_verifier, chi2, enumerate_round
from outrider.verifiers import Rejection

TEMPLATES = Path(__file__).parent.parent / "docs/templates"
VOCAB_SIZE = 3


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"template_{name}", TEMPLATES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Unigram = _load("drafter").Unigram
Shy = _load("verifier").Shy


# ---------------------------------------------------------------------------------- the verifier


def test_verifier_keeps_the_contract_and_is_exactly_lossless() -> None:
    check_verifier(Shy(0.3), accepts_own_distribution=False)


def test_verifier_with_shyness_one_is_rejection_sampling() -> None:
    target, drafter = ToyModel.random(VOCAB_SIZE, seed=1), Unigram(VOCAB_SIZE)
    mine = enumerate_round(target, drafter, Shy(1.0), 3).acceptance_length
    assert mine == pytest.approx(enumerate_round(target, drafter, Rejection(), 3).acceptance_length)


@dataclass(frozen=True)
class WrongResidual(Shy):  # type: ignore[misc, valid-type]
    """A mistake near at hand: the residual of the rule this one was copied from."""

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return Rejection().reject(p_V, q_V, x)


def test_kit_rejects_the_wrong_residual() -> None:
    with pytest.raises(AssertionError, match="claims to be lossless"):
        check_verifier(WrongResidual(0.5), accepts_own_distribution=False)


@pytest.mark.parametrize("shyness", [0.0, -1.0, 1.5])
def test_verifier_refuses_parameters_outside_their_domain(shyness: float) -> None:
    with pytest.raises(ValueError, match="shyness"):
        Shy(shyness)


# ----------------------------------------------------------------------------------- the drafter


def test_drafter_keeps_the_contract() -> None:
    """A right drafter fails with probability below 1e-6 over seeds; the seed is fixed."""
    check_drafter(Unigram(5), 5)


class ForgetsToCommit(Unigram):  # type: ignore[misc, valid-type]
    """Its state parts from the context after the first round."""

    def commit(self, *args: object) -> None:
        pass


class DeclaresAnotherDistribution(Unigram):  # type: ignore[misc, valid-type]
    """Draws from the frequencies, declares a uniform distribution."""

    def propose(self, state: object, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        return replace(draft, probs_BNV=torch.full_like(draft.probs_BNV, 1 / self.vocab_size))


def test_kit_rejects_a_drafter_that_forgets_to_commit() -> None:
    with pytest.raises(AssertionError, match="after commit"):
        check_drafter(ForgetsToCommit(5), 5)


def test_kit_rejects_a_drafter_that_declares_another_distribution() -> None:
    with pytest.raises(AssertionError, match="declared probs"):
        check_drafter(DeclaresAnotherDistribution(5), 5)


# -------------------------------------------------------------------------------------- together


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_pair_is_exactly_lossless(num_tokens: int) -> None:
    target = ToyModel.random(VOCAB_SIZE, seed=2)
    distribution = enumerate_round(
        target, Unigram(VOCAB_SIZE), Shy(0.6), num_tokens, prompt=(0, 1, 1, 2)
    )
    assert distribution.total_variation < 1e-12


def test_pair_samples_the_targets_distribution() -> None:
    """False-alarm probability 1e-4 over seeds; the seed is fixed."""
    target = ToyModel.random(VOCAB_SIZE, seed=3)
    assert chi2(target, Unigram(VOCAB_SIZE), Shy(0.6), prompt=(0, 1, 1, 2)) > 1e-4
