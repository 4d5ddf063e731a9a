"""BiLD: its limits, where it rolls back, how often the large model runs, and mutants.

Legend: B rows, N nodes, V vocabulary.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids
from torch import Tensor

from outrider import Result, Results, Sampling
from outrider.core import Bound, Draft, Stream, output_distribution, row_keys
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.testing import ToyDrafter, ToyModel, check_verifier, enumerate_round
from outrider.verifiers import Bild

LARGE, SMALL = tiny("llama", 0, dtype=torch.float64), tiny("llama", 1, dtype=torch.float64)
PROMPTS = ragged_prompts([5, 2, 8])
NUM = 24


def bild(γ: int = 3, num: int = NUM, **options: object) -> Results:
    return engine_of(LARGE, SMALL, "bild", γ, options=options).generate(PROMPTS, greedy(num))


def chain(tokens: list[int], logits_NV: Tensor) -> tuple[Draft, Tensor, Stream]:
    tokens_BN = torch.tensor([tokens])
    draft = Draft.chain(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool), None, "chosen")
    return draft, logits_NV[None], Stream(row_keys([0], [0], "cpu"), torch.tensor([5]))


def test_strict_thresholds_give_the_large_model_alone() -> None:
    """α_RB = 0, α_FB = 1: token for token; 0 means 0, not the default."""
    large = engine_of(LARGE).generate(PROMPTS, greedy(NUM))
    assert token_ids(bild(rollback=0.0, fallback=1.0)) == token_ids(large)
    assert token_ids(bild(rollback=0.0, fallback=0.0)) == token_ids(large)


def test_without_rollback_and_fallback_the_large_model_emits_one_token_per_round() -> None:
    """α_RB = ∞, α_FB = 0: the first token and every (γ+1)-th are the large model's."""
    γ, num = 3, 1 + 5 * 4
    results = bild(γ, num, rollback=math.inf, fallback=0.0)
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens = list(prompt)
        for i in range(num):
            model = LARGE if i % (γ + 1) == 0 else SMALL
            (one,) = engine_of(model).generate([tokens], greedy(1))
            tokens += one.token_ids
        assert result.token_ids == tuple(tokens[len(prompt) :])


def test_large_calls_are_fallbacks_and_forced_calls() -> None:
    """Every round calls the large model once: at the start, after γ tokens, at an uncertain step,
    or at the end."""
    γ = 4
    (first, *_) = results = bild(γ, fallback=0.5, rollback=math.inf)
    assert first.origins[0] == "plain"
    for result in results:
        assert result.stats.rounds == sum(origin != "accepted" for origin in result.origins)
        assert result.stats.acceptance_rate == 1


def test_rolls_back_at_the_earliest_violation() -> None:
    """Surprises 0.1, 3, 9 nats at threshold 2: the second token falls, and the third with it. At
    threshold 0 the first stays, as the argmax."""
    logits_NV = torch.full((4, 3), -1e9, dtype=torch.float64)
    for node, surprise in enumerate([0.1, 3.0, 9.0]):
        logits_NV[node, 1] = -surprise
        logits_NV[node, 2] = math.log(-math.expm1(-surprise))
    logits_NV[3, 0] = 0.0
    draft, z_BNV, rng = chain([0, 1, 1, 1], logits_NV)
    for rollback, kept, following in ((2.0, 1, 2), (3.5, 2, 2), (9.5, 3, 0), (0.0, 1, 2)):
        verdict = Bild(rollback)(draft, z_BNV, rng)
        assert (int(verdict.num_accepted_B), int(verdict.next_token_B)) == (kept, following)


def test_no_rollback_where_the_large_model_would_say_the_same() -> None:
    """At threshold 0 a token of probability below 1 stays if it is the argmax."""
    logits_NV = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    draft, z_BNV, rng = chain([0, 1], logits_NV)
    verdict = Bild(0.0)(draft, z_BNV, rng)
    assert (int(verdict.num_accepted_B), int(verdict.next_token_B)) == (1, 0)


def test_original_is_for_temperature_zero() -> None:
    engine = engine_of(LARGE, SMALL, "bild")
    with pytest.raises(IncompatibleError, match=r"temperature 0 only.*mode='mjsd'"):
        engine.generate(PROMPTS, Sampling(temperature=0.7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollback": -1.0}, r"rollback=-1.0: must be .* 0 or greater"),
        ({"rollback": math.nan}, "rollback=nan"),
        ({"fallback": 1.5}, r"fallback=1.5: must be in \[0, 1\]"),
        ({"mode": "paper"}, "mode='paper': must be one of original, mjsd"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        engine_of(LARGE, SMALL, "bild", options=options)


class TestMjsd:
    """The variant of the MJSD paper: sampled tokens, warped distributions."""

    rule = Bild(1.0, "mjsd")

    def test_contract(self) -> None:
        check_verifier(self.rule, trees=False, accepts_own_distribution=False)

    @pytest.mark.parametrize("num_impossible", [0, 1])
    def test_emits_its_closed_form(self, num_impossible: int) -> None:
        for seed in range(4):
            target = ToyModel.random(4, seed=seed, num_impossible=num_impossible)
            drafter = ToyDrafter(ToyModel.random(4, seed=50 + seed))
            assert difference(target, drafter, self.rule) < 1e-10

    def test_kept_tokens_are_below_the_threshold(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(10_000):
            V = int(torch.randint(2, 50, (), generator=generator))
            p_V = (3 * torch.randn(V, generator=generator, dtype=torch.float64)).softmax(-1)
            rollback = 6 * float(torch.rand((), generator=generator))
            kept_V = Bild(rollback, "mjsd").acceptance(p_V, p_V) > 0
            assert (-p_V[kept_V].log() <= rollback + 1e-12).all()
            assert (-p_V[~kept_V].log() > rollback - 1e-12).all()

    def test_the_uncertain_token_is_kept_and_verified(self) -> None:
        """With fallback 1 every draft is one token, not none."""
        sampling = Sampling(max_new_tokens=NUM, ignore_eos=True)
        options = {"mode": "mjsd", "fallback": 1.0, "rollback": math.inf}
        result: Result
        for result in engine_of(LARGE, SMALL, "bild", options=options).generate(PROMPTS, sampling):
            assert result.origins[:2] == ("accepted", "bonus")


def difference(target: ToyModel, drafter: ToyDrafter, rule: Bild) -> float:
    """Largest difference between the enumerated distribution and the closed form."""
    found = enumerate_round(target, drafter, rule, 1, length=1)
    guess = enumerate_round(drafter.model, ToyDrafter(drafter.model), rule, 0, length=1)
    pi_V = output_distribution(Bild(rule.rollback, "mjsd"), found.target_S, guess.target_S)
    return float((found.completed_S - pi_V).abs().max())


@dataclass(frozen=True)
class FromTheResidual(Bild):
    """Wrong: a rolled-back token is replaced by a draw from the residual."""

    mode: str = "mjsd"  # type: ignore[assignment]

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        assert q_V is not None
        return (p_V - q_V).clamp(min=0), q_V


@dataclass(frozen=True)
class ZeroIsTheDefault(Bild):
    """Wrong: a threshold of 0 becomes 5, as in ``rollback or 5.0``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollback", self.rollback or 5.0)

    @property
    def bound(self) -> Bound:
        return super().bound


def test_mutants_are_rejected() -> None:
    target, drafter = ToyModel.random(4, seed=1), ToyDrafter(ToyModel.random(4, seed=51))
    assert difference(target, drafter, FromTheResidual(1.0)) > 1e-3
    logits_NV = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    draft, z_BNV, rng = chain([0, 0], logits_NV)
    assert int(Bild(0.0)(draft, z_BNV, rng).num_accepted_B) == 0
    assert int(ZeroIsTheDefault(0.0)(draft, z_BNV, rng).num_accepted_B) == 1
