"""Joint decoding: its limits, the scan over all prefixes, underflow, the full distribution,
mutants.

Legend: B rows, N nodes, D candidates, V vocabulary.
"""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from toy_trees import TreeDrafter, chain_of, stream

from outrider.core import (
    Budget,
    Context,
    Distribution,
    Draft,
    Prefix,
    Role,
    Stream,
    Verdict,
    Verifier,
    draw,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.testing import (
    SoftmaxDistribution,
    ToyCache,
    ToyDrafter,
    ToyModel,
    check_verifier,
    enumerate_round,
)
from outrider.verifiers.joint import Joint, path_logs

TARGET, GUESS = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)


def ratios_chain(ratios: list[float], q: float = 0.25) -> tuple[Draft, Tensor]:
    """A chain of token 0 with these P_i / Q_i, over two tokens, and its p."""
    D = len(ratios)
    steps_D = torch.tensor(ratios).double() / torch.tensor([1.0, *ratios[:-1]]).double()
    p_BNV = torch.full((1, D + 1, 2), 0.5).double()
    p_BNV[0, :D, 0] = q * steps_D
    p_BNV[0, :D, 1] = 1 - q * steps_D
    q_BDV = torch.tensor([q, 1 - q]).double().expand(1, D, 2)
    return chain_of(torch.zeros(1, D, dtype=torch.int64), q_BDV), p_BNV


def num_accepted(rule: Joint, draft: Draft, p_BNV: Tensor) -> int:
    return int(rule(draft, p_BNV, stream(1)).num_accepted_B)


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 0.9, 1.0, 3.0])
def test_contract(tau: float) -> None:
    found = check_verifier(Joint(tau), trees=False, accepts_own_distribution=tau < 1)
    assert (max(found.values()) < 1e-12) == (tau >= 1)
    assert Joint(tau).bound.threshold == tau


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_from_one_on_it_is_plain_sampling(tau: float) -> None:
    result = enumerate_round(TARGET, ToyDrafter(GUESS), Joint(tau), 3)
    assert result.total_variation < 1e-12
    assert result.acceptance_length == pytest.approx(1, abs=1e-12)


def test_a_failing_prefix_does_not_stop_the_scan() -> None:
    draft, p_BNV = ratios_chain([0.8, 0.3, 0.6, 0.2])
    assert num_accepted(Joint(0.5), draft, p_BNV) == 3
    assert num_accepted(Joint(0.25), draft, p_BNV) == 3
    assert num_accepted(Joint(0.7), draft, p_BNV) == 1
    assert num_accepted(Joint(0.9), draft, p_BNV) == 0


def test_the_threshold_is_met_to_a_billionth() -> None:
    draft, p_BNV = ratios_chain([0.5])
    assert num_accepted(Joint(0.5 + 1e-9), draft, p_BNV) == 0
    assert num_accepted(Joint(0.5 - 1e-9), draft, p_BNV) == 1


def test_a_ratio_above_one_counts_as_one() -> None:
    draft, p_BNV = ratios_chain([3.0])
    assert num_accepted(Joint(0.99), draft, p_BNV) == 1
    assert num_accepted(Joint(1.0), draft, p_BNV) == 0
    assert num_accepted(Joint(2.0), draft, p_BNV) == 0


@pytest.mark.parametrize("tau", [0.0, 0.5, 0.99])
def test_a_draft_from_the_targets_distribution_is_accepted_whole(tau: float) -> None:
    result = enumerate_round(TARGET, ToyDrafter(TARGET), Joint(tau), 3)
    assert result.acceptance_length == pytest.approx(4, abs=1e-12)


def test_accepts_less_the_higher_tau() -> None:
    """For each of 1,000 fixed drafts of 8 tokens."""
    p_BNV = (1.5 * torch.randn(1000, 9, 5)).softmax(-1)
    q_BDV = (1.5 * torch.randn(1000, 8, 5)).softmax(-1)
    tokens_BD = torch.randint(5, (1000, 8))
    draft = chain_of(tokens_BD, q_BDV)
    numbers = [
        Joint(tau)(draft, p_BNV, stream(1000)).num_accepted_B for tau in (0, 0.01, 0.1, 0.5, 0.9, 1)
    ]
    for more_B, fewer_B in itertools.pairwise(numbers):
        assert (more_B >= fewer_B).all()
        assert (more_B > fewer_B).any()


def test_zeros_of_the_target_end_every_longer_prefix() -> None:
    draft, p_BNV = ratios_chain([0.8, 0.8, 0.8, 0.8])
    p_BNV[0, 2] = torch.tensor([0.0, 1.0])
    assert num_accepted(Joint(0.0), draft, p_BNV) == 2
    assert num_accepted(Joint(0.5), draft, p_BNV) == 2


@pytest.mark.parametrize("step", [-4.0, -9.0])
def test_64_tokens_do_not_underflow_and_only_the_ratio_counts(step: float) -> None:
    """Both products of 64 float32 numbers underflow to 0; their ratio does not change."""
    drift_D = torch.zeros(64)
    drift_D[[10, 63]] = torch.tensor([-1.0, 0.9])  # ratios: 1, then e^-1, at last e^-0.1
    shift_D = torch.full((64,), step)
    p_BNV = torch.zeros(1, 65, 2)
    p_BNV[0, :64, 0] = (shift_D + drift_D).exp()
    p_BNV[..., 1] = 1 - p_BNV[..., 0]
    q_BDV = torch.stack([shift_D.exp(), 1 - shift_D.exp()], -1)[None]
    assert p_BNV[0, :64, 0].prod() == 0
    draft = chain_of(torch.zeros(1, 64, dtype=torch.int64), q_BDV)
    assert num_accepted(Joint(0.9), draft, p_BNV) == 64
    assert num_accepted(Joint(0.95), draft, p_BNV) == 10
    log_P_BN, log_Q_BN = path_logs(draft, p_BNV)
    assert float(log_Q_BN[0, -1]) == pytest.approx(64 * step, rel=1e-6)
    assert float((log_P_BN - log_Q_BN)[0, -1]) == pytest.approx(-0.1, abs=1e-4)


def test_logs_of_a_tree_are_those_of_its_paths() -> None:
    p_BNV, q_BNV = torch.rand(2, 5, 3), torch.rand(2, 5, 3)
    parents_BN = torch.tensor([-1, 0, 0, 1, 3]).expand(2, 5)
    tokens_BN = torch.randint(3, (2, 5))
    draft = Draft(tokens_BN, parents_BN, torch.ones(2, 5).bool(), q_BNV, "iid")
    chain = Draft.chain(tokens_BN[:, [0, 1, 3, 4]], torch.ones(2, 4).bool(), q_BNV, "iid")
    chain = replace(chain, probs_BNV=q_BNV[:, [0, 1, 3, 4]])
    along = path_logs(chain, p_BNV[:, [0, 1, 3, 4]])
    for of_tree_BN, of_chain_BN in zip(path_logs(draft, p_BNV), along, strict=True):
        assert torch.allclose(of_tree_BN[:, [0, 1, 3, 4]], of_chain_BN)


@pytest.mark.parametrize(("tau", "accepted"), [(0.0, 4), (0.35, 3), (0.45, 1), (0.75, 1), (0.9, 0)])
def test_the_step_quantity_replaces_q(tau: float, accepted: int) -> None:
    """P_i / S_i = 0.8, 0.15, 0.4, 0.1, from P_i / Q_i twice as large where S_i = 2 Q_i."""
    draft, p_BNV = ratios_chain([0.8, 0.3, 0.8, 0.1])
    shares_BN = 0.25 ** torch.arange(5)[None] * torch.tensor([[1, 1, 2, 2, 1]])
    draft = replace(draft, step_probs_BN=shares_BN.double())
    assert num_accepted(Joint(tau, "step"), draft, p_BNV) == accepted
    other = num_accepted(Joint(tau), draft, p_BNV)
    assert other == {0.0: 4, 0.35: 3, 0.45: 3, 0.75: 3, 0.9: 0}[tau]


def sharper(num_rows: int) -> Distribution:
    return Sharper()


class Sharper(SoftmaxDistribution):
    """The square of the softmax: a warp."""

    def __call__(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        return (2 * logits_BMV).softmax(-1)


class WithLogits(ToyDrafter):
    """Also provides its model's logits."""

    def propose(self, state: ToyCache, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        node_BN = self.model.read_draft(state.past_B, draft)
        return replace(draft, logits_BNV=self.model.logits(node_BN))


def raw_distribution_by_hand(tau: float) -> Tensor:
    """As ``distribution_by_hand``, with tokens drafted and emitted from the sharper distributions
    and verified by the raw ones."""
    return distribution_by_hand(tau, sharpness=2.0)


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 0.9])
def test_raw_distributions_verify_and_warped_distributions_emit(tau: float) -> None:
    rule = Joint(tau, distributions="raw")
    result = enumerate_round(TARGET_1, WithLogits(GUESS_1), rule, 2, distribution=sharper)
    assert float((result.completed_S - raw_distribution_by_hand(tau)).abs().sum()) < 1e-12


@dataclass(frozen=True)
class RawThroughout(Joint):
    """Wrong: the next token is drawn from the raw distribution, too."""

    def with_raw_logits(self, logits_BNV: Tensor) -> Verifier:
        return RawNext(self.tau, logits_BNV=logits_BNV)


@dataclass(frozen=True, eq=False)
class RawNext(Joint):
    logits_BNV: Tensor | None = None

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        assert self.logits_BNV is not None
        raw = Joint(self.tau, distributions="raw").with_raw_logits(self.logits_BNV)
        return raw(draft, self.logits_BNV.softmax(-1), rng)


@pytest.mark.parametrize("mutant", [Joint(0.1), RawThroughout(0.5)])
def test_mutants_of_raw_distributions_are_rejected(mutant: Joint) -> None:
    """One verifies by the warped distributions, the other emits from the raw ones."""
    result = enumerate_round(TARGET_1, WithLogits(GUESS_1), mutant, 2, distribution=sharper)
    assert float((result.completed_S - raw_distribution_by_hand(mutant.tau)).abs().sum()) > 1e-3


def test_raw_distributions_from_one_on_it_is_plain_sampling() -> None:
    rule = Joint(1.0, distributions="raw")
    result = enumerate_round(TARGET_1, WithLogits(GUESS_1), rule, 2, distribution=sharper)
    assert result.total_variation < 1e-12


def test_what_the_options_need_must_be_there() -> None:
    draft, p_BNV = ratios_chain([0.8, 0.3])
    for rule, message in (
        (Joint(distributions="raw"), "the target's logits are missing"),
        (
            Joint(distributions="raw").with_raw_logits(p_BNV.log()),
            "distributions='raw': .* no logits; use one that does",
        ),
        (Joint(quantity="step"), "quantity='step': .* no search steps"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            rule(draft, p_BNV, stream(1))
    empty = Draft.root_only(torch.tensor([1]))
    for rule in (
        Joint(quantity="step"),
        Joint(distributions="raw").with_raw_logits(p_BNV[:, :1].log()),
    ):
        assert int(rule(empty, p_BNV[:, :1], stream(1)).num_accepted_B) == 0


def test_options_outside_their_domain() -> None:
    with pytest.raises(InvalidParameterError, match="quantity='last'"):
        Joint(quantity="last")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="distributions='own'"):
        Joint(distributions="own")  # type: ignore[arg-type]


@pytest.mark.parametrize("tau", [-0.1, math.inf, math.nan])
def test_tau_outside_its_range(tau: float) -> None:
    with pytest.raises(InvalidParameterError, match=r"tau=.*must be finite and at least 0"):
        Joint(tau)


def test_a_tree_is_an_error() -> None:
    with pytest.raises(IncompatibleError, match="a single path"):
        enumerate_round(TARGET, TreeDrafter(GUESS, [0, 0]), Joint(), 2)


def distribution_by_hand(tau: float, prompt_state: int = 1, sharpness: float = 1.0) -> Tensor:
    """Distribution of three tokens after one round of Joint on toys that look one token back, γ =
    2.

    The rule verifies by the softmax; with a sharpness other than 1, tokens are drafted and emitted
    from sharper distributions.
    """
    raw_p_VV, raw_q_VV = TARGET_1.table_EV.softmax(-1), GUESS_1.table_EV.softmax(-1)
    p_VV, q_VV = ((sharpness * model.table_EV).softmax(-1) for model in (TARGET_1, GUESS_1))
    probs_S = torch.zeros(3, 3, 3, dtype=torch.float64)
    for x in range(3):
        for y in range(3):
            drafted = q_VV[prompt_state, x] * q_VV[x, y]
            first = raw_p_VV[prompt_state, x] / raw_q_VV[prompt_state, x]
            second = first * raw_p_VV[x, y] / raw_q_VV[x, y]
            if tau < min(1.0, float(second)):
                probs_S[x, y] += drafted * p_VV[y]
            elif tau < min(1.0, float(first)):
                probs_S[x] += drafted * p_VV[x][:, None] * p_VV
            else:
                free_S = p_VV[prompt_state][:, None, None] * p_VV[:, :, None] * p_VV[None]
                probs_S += drafted * free_S
    return probs_S.flatten()


TARGET_1, GUESS_1 = (ToyModel.random(3, order=1, seed=s) for s in (1, 2))


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 0.9])
def test_the_distribution_is_the_expected_one(tau: float) -> None:
    result = enumerate_round(TARGET_1, ToyDrafter(GUESS_1), Joint(tau), 2)
    assert float((result.completed_S - distribution_by_hand(tau)).abs().sum()) < 1e-12


@dataclass(frozen=True)
class FirstFailureStops(Joint):
    """Wrong: the scan ends at the first failing prefix."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        log_P_BN, log_Q_BN = path_logs(draft, p_BNV)
        good_BD = (log_P_BN - log_Q_BN)[:, 1:] > math.log(self.tau)
        return _stop_at(good_BD.long().cumprod(1).sum(1), draft, p_BNV, rng)


@dataclass(frozen=True)
class OneTooMany(Joint):
    """Wrong: counts prefixes from 0, as the paper's η <- -1 suggests, and accepts one too many."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        num_B = super().__call__(draft, p_BNV, rng).num_accepted_B
        return _stop_at((num_B + 1).clamp(max=draft.num_nodes - 1), draft, p_BNV, rng)


@dataclass(frozen=True)
class Residual(Joint):
    """Wrong: draws the next token from the residual, as rejection does."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        num_B = super().__call__(draft, p_BNV, rng).num_accepted_B
        q_BNV = draft.probs_BNV
        assert q_BNV is not None
        whole_B11 = (num_B == draft.num_drafted_B)[:, None, None]
        return _stop_at(num_B, draft, torch.where(whole_B11, p_BNV, p_BNV - q_BNV).clamp(0), rng)


@dataclass(frozen=True)
class StepByStep(Joint):
    """Wrong: compares the last step only, not the product."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        log_P_BN, log_Q_BN = path_logs(draft, p_BNV)
        good_BD = (log_P_BN - log_Q_BN).diff(dim=1) > math.log(self.tau)
        depth_D = torch.arange(1, draft.num_nodes)
        return _stop_at(torch.where(good_BD, depth_D, 0).amax(1), draft, p_BNV, rng)


def _stop_at(num_B: Tensor, draft: Draft, probs_BNV: Tensor, rng: Stream) -> Verdict:
    probs_BV = probs_BNV[torch.arange(len(num_B)), num_B]
    path_BD = torch.arange(1, draft.num_nodes).expand(len(num_B), -1)
    return Verdict(path_BD, num_B, draw(probs_BV, rng.uniform(Role.NEXT, 1)[:, 0]))


@pytest.mark.parametrize(
    "mutant", [FirstFailureStops(0.5), OneTooMany(0.5), Residual(0.5), StepByStep(0.5)]
)
def test_mutants_are_rejected(mutant: Joint) -> None:
    result = enumerate_round(TARGET_1, ToyDrafter(GUESS_1), mutant, 2)
    assert float((result.completed_S - distribution_by_hand(0.5)).abs().sum()) > 1e-3
