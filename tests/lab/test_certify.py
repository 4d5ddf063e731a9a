"""``certify`` on pairs with a known answer: correct ones pass, whatever the rule and the draft.

The statistical checks reject a correct pair with probability below 1e-3 per run; seeds are fixed.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_models import ragged_prompts, tiny
from torch import Tensor

from outrider.core import Bound, Draft, Verdict
from outrider.core.errors import IncompatibleError, NonFiniteLogitsError
from outrider.drafters import ModelDrafter, NoDraft
from outrider.lab.certify import Certificate, certify
from outrider.lab.certify.positions import DraftedPositions, coarsened, divergence
from outrider.lab.certify.report import Check, rounded_up
from outrider.runtime import HFModel
from outrider.sampling import Sampling, Warp
from outrider.testing import (
    ToyDrafter,
    ToyModel,
    greedy_distribution,
    mutants,
    softmax_distribution,
)
from outrider.verifiers import Bild, Block, Coupled, Greedy, Lenience, Rejection, SampleMatch

TARGET, GUESS = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)
PROMPTS = [[0, 1], [2, 1, 1]]


def toy(
    target: Any,
    drafter: Any,
    verifier: Any,
    distribution: Any = softmax_distribution,
    **settings: Any,
) -> Certificate:
    sizes = {"num_samples": 1500, "length": 3, "num_positions": 48, "batch_size": 1000}
    return certify(target, drafter, verifier, PROMPTS, distribution, 2, **(sizes | settings))


def number(certificate: Certificate, name: str) -> float:
    (check,) = [check for check in certificate.checks if check.name == name]
    assert check.number is not None
    return check.number


def marks(certificate: Certificate) -> dict[str, bool | None]:
    return {check.name: check.passed for check in certificate.checks}


@dataclass(frozen=True)
class AnyDraft(SampleMatch):
    """Sample matching, declared for every kind of draft, since it is lossless for all of them."""

    accepts: frozenset[str] = frozenset({"iid", "distinct", "chosen", "searched"})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        (ToyDrafter(GUESS), Rejection()),
        (ToyDrafter(GUESS), Block()),
        (ToyDrafter(GUESS), SampleMatch()),
        (ToyDrafter(GUESS, 1, "chosen"), Rejection()),
        (ToyDrafter(GUESS, 1, "searched"), AnyDraft()),
        (ToyDrafter(GUESS, confidence=0.35), Rejection()),
        (ToyDrafter(GUESS, 2), Rejection()),
        (ToyDrafter(GUESS, 2, "distinct"), mutants.WithoutReplacement()),
    ],
    ids=[
        "rejection",
        "block",
        "sample-match",
        "chosen",
        "searched",
        "confidence",
        "tree",
        "distinct",
    ],
)
def test_correct_pairs_pass(drafter: ToyDrafter, verifier: Any) -> None:
    certificate = toy(TARGET, drafter, verifier)
    assert certificate.passed, certificate
    assert certificate.verdict.startswith("LOSSLESS as far as tested: ")
    assert "end-to-end deviation > 0." in certificate.verdict
    found = marks(certificate)
    assert found["states"]
    assert found["rounds"]
    assert found["tokens"]
    assert found["outputs"]
    assert found["drafts"] is (None if drafter.drawn in ("chosen", "searched") else True)
    assert found["positions"] is (True if hasattr(verifier, "accept") else None)
    assert number(certificate, "rounds") < 1e-12


def test_a_rule_with_noise_of_its_own_is_counted_instead_of_enumerated() -> None:
    certificate = toy(TARGET, ToyDrafter(GUESS, 1, "chosen"), Coupled())
    assert certificate.passed
    (rounds,) = [check for check in certificate.checks if check.name == "rounds"]
    assert "not enumerable" in rounds.words
    assert "enumeration" not in certificate.verdict
    assert "deviation of whole rounds > 0.02" in certificate.verdict


def test_plain_decoding_passes() -> None:
    certificate = toy(TARGET, NoDraft(), Rejection())
    assert certificate.passed
    assert marks(certificate)["positions"] is None


def test_greedy_settings_must_emit_the_argmax() -> None:
    certificate = toy(TARGET, ToyDrafter(GUESS), Greedy(), greedy_distribution)
    assert certificate.passed
    assert "all 96 tokens are the target's argmax" in certificate.verdict


def test_a_wrong_greedy_output_fails_and_a_near_tie_does_not() -> None:
    class NextBest(Greedy):
        def __call__(self, draft: Draft, p_BNV: Tensor, rng: Any) -> Verdict:
            second_BN = p_BNV.topk(2).indices[..., 1]
            none_B = torch.zeros_like(second_BN[:, 0])
            return Verdict(draft.tokens_BN[:, 1:] * 0, none_B, second_BN[:, 0])

    certificate = toy(TARGET, ToyDrafter(GUESS), NextBest(), greedy_distribution)
    assert marks(certificate)["greedy"] is False
    table_EV = TARGET.table_EV.clone()
    table_EV[:, 1:] = table_EV[:, :1] - torch.tensor([1e-6, 5.0])
    near = toy(ToyModel(table_EV), ToyDrafter(GUESS), NextBest(), greedy_distribution)
    (greedy,) = [check for check in near.checks if check.name == "greedy"]
    assert greedy.passed
    assert "96 up to a near-tie" in greedy.words


def test_a_lossy_rule_within_its_bound_passes() -> None:
    certificate = toy(TARGET, ToyDrafter(GUESS), Lenience(0.5))
    assert certificate.passed
    assert certificate.verdict.startswith("AS CLAIMED")
    found = marks(certificate)
    assert found["positions"]
    assert found["rounds"]
    assert found["tokens"] is None  # reported only
    assert found["outputs"] is None
    assert 0 < number(certificate, "positions") <= -torch.tensor(0.5).log() + 1e-9


def test_a_rule_without_a_bound_is_only_measured() -> None:
    certificate = toy(TARGET, ToyDrafter(GUESS), Bild(mode="mjsd"), num_samples=0)
    assert certificate.passed
    assert certificate.verdict.startswith("LOSSY WITHOUT A BOUND that could be tested")
    assert "TV of positions reached 0." in certificate.verdict


@dataclass(frozen=True)
class TooSmallBound(Lenience):
    """Wrong: claims a bound that is too small."""

    bound: Bound = field(default=Bound("hardly anything is lost", "rkl", 0.01))  # type: ignore[misc]


def test_a_rule_beyond_its_bound_fails() -> None:
    certificate = toy(TARGET, ToyDrafter(GUESS), TooSmallBound(0.5), num_samples=0)
    assert not certificate.passed
    assert marks(certificate)["positions"] is False
    assert marks(certificate)["rounds"] is False
    assert certificate.verdict.startswith("NOT AS CLAIMED: TooSmallBound fails positions, rounds;")


@dataclass(frozen=True)
class Inconsistent(Rejection):
    """Wrong: ``acceptance`` disagrees with ``accept``."""

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return super().acceptance(p_V, q_V) * 0.99


def test_accept_must_agree_with_acceptance() -> None:
    certificate = toy(TARGET, ToyDrafter(GUESS), Inconsistent(), num_samples=0)
    assert marks(certificate)["positions"] is False
    assert "disagree" in certificate.checks[1].words


def test_an_error_raised_by_the_rule_fails_the_check() -> None:
    class Broken(Rejection):
        def __call__(self, draft: Draft, p_BNV: Tensor, rng: Any) -> Verdict:
            raise IndexError("no such node")

    certificate = toy(TARGET, ToyDrafter(GUESS), Broken(), num_samples=0)
    assert not certificate.passed
    assert "IndexError: no such node" in certificate.checks[0].words


def test_incompatible_drafts_raise_an_error() -> None:
    with pytest.raises(IncompatibleError, match="cannot verify 'distinct'"):
        toy(TARGET, ToyDrafter(GUESS, 2, "distinct"), Rejection())


def test_the_document_has_every_check() -> None:
    certificate = toy(TARGET, ToyDrafter(GUESS), Rejection(), num_samples=0)
    document = certificate.as_dict()
    assert document["passed"] is True
    assert document["rule"] == "Rejection"
    assert [check["name"] for check in document["checks"]] == [c.name for c in certificate.checks]


# ------------------------------------------------------------------------- transformers models


def tiny_pair(sampling: Sampling, target: HFModel | None = None, **settings: Any) -> Certificate:
    target = target or tiny(seed=1)
    settings = {"num_samples": 96, "num_positions": 32, "batch_size": 48} | settings
    with torch.inference_mode():
        return certify(
            target,
            ModelDrafter(tiny(seed=2), target.num_tokens, 0.05),
            Greedy() if sampling.greedy else Rejection(),
            ragged_prompts([5, 9]),
            lambda num_rows: Warp([sampling] * num_rows, target.num_tokens),
            3,
            limit=target.limit,
            **settings,
        )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.2),
        Sampling(temperature=0),
    ],
    ids=["plain", "warped", "greedy"],
)
def test_tiny_models_pass(sampling: Sampling) -> None:
    certificate = tiny_pair(sampling)
    assert certificate.passed, certificate
    assert marks(certificate)["states"]


class OneNodeTooMany(HFModel):
    """Wrong: after a rejection, commits one node more than was accepted."""

    def commit(self, cache: Any, draft: Draft, verdict: Verdict) -> None:
        num_B = (verdict.num_accepted_B + 1).clamp(max=draft.num_nodes - 1)
        wrong = Verdict(verdict.path_BD, num_B, verdict.next_token_B)
        super().commit(cache, draft, wrong.read())


def test_a_cache_that_is_not_rolled_back_is_found() -> None:
    right = tiny(seed=1)
    certificate = tiny_pair(Sampling(), OneNodeTooMany(right.module), num_samples=0)
    assert marks(certificate)["states"] is False


def test_nan_logits_raise_an_error_that_names_the_model() -> None:
    target = tiny(seed=1)
    with torch.no_grad():
        next(target.module.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteLogitsError, match="target produced NaN"):
        tiny_pair(Sampling(), target)


# ------------------------------------------------------------------------------------- parts


def test_coarse_distributions_keep_the_mass_and_the_candidate() -> None:
    p_KV = torch.rand(20, 50).softmax(1)
    q_KV = torch.rand(20, 50).softmax(1)
    x_K = torch.arange(20)
    coarse = coarsened(DraftedPositions(p_KV, q_KV, x_K, True), 4)
    assert coarse.p_KV.shape == (20, 4)
    assert torch.allclose(coarse.p_KV.sum(1), torch.ones(20).double())
    candidate_K = coarse.p_KV.gather(1, coarse.x_K[:, None])[:, 0]
    assert torch.allclose(candidate_K, p_KV[range(20), x_K].double(), atol=1e-6)


def test_divergences() -> None:
    p_KV, pi_KV = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
    assert divergence("tv", p_KV, pi_KV).item() == pytest.approx(0.25)
    assert divergence("kl", p_KV, pi_KV).item() == pytest.approx(0.143841, abs=1e-6)
    assert divergence("rkl", p_KV, pi_KV).item() == pytest.approx(0.130812, abs=1e-6)
    assert divergence("chi2", p_KV, pi_KV).item() == pytest.approx(1 / 3)
    assert divergence("kl", p_KV, p_KV.roll(1)).item() == torch.inf


def test_bounds_are_rounded_up() -> None:
    assert [rounded_up(x) for x in (0.0, 1.21e-7, 1.2e-7, 0.999, 3.0)] == [
        "0",
        "1.3e-07",
        "1.2e-07",
        "1",
        "3",
    ]


def test_without_results_the_verdict_is_inconclusive() -> None:
    certificate = Certificate("R", "c", True, False, [Check.skipped("positions", "why")])
    assert certificate.passed
    assert certificate.verdict == "INCONCLUSIVE: no check failed for R, but none showed anything."
