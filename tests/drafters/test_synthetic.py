"""Synthetic drafts: the set acceptance rate occurs at any temperature, and outputs stay plain's."""

from math import sqrt

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Sampling
from outrider.core import Context
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.synthetic import Synthetic
from outrider.testing import SoftmaxDistribution, ToyModel, check_drafter, enumerate_round
from outrider.verifiers import Block, Coupled, Rejection

TARGET = tiny("llama", dtype=torch.float64)
PROMPTS = ragged_prompts([5, 1, 9, 3])


def synthetic(acceptance: float, γ: int = 4, **settings: object) -> Engine:
    return engine_of(TARGET, None, "synthetic", γ, options={"acceptance": acceptance}, **settings)


def rehearsed(acceptance: float, text: tuple[int, ...], prompt: tuple[int, ...]) -> Synthetic:
    """A drafter that has recorded what follows a prompt in a context with seed and request 0."""
    drafter = Synthetic(3, acceptance)
    key = int(Context.start([prompt], SoftmaxDistribution(), [0], [0]).key_B[0])
    for each in (key, 0):  # enumeration's contexts have keys of zero
        drafter.memory[each, prompt] = [*prompt, *text]
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_the_rate_is_the_set_one(temperature: float, acceptance: float) -> None:
    """Verified tokens are accepted with probability a, at every depth alike. A right drafter fails
    with probability below 1e-5: 4.5 standard deviations, and the seed is fixed."""
    engine = synthetic(acceptance, max_batch_size=32)
    sampling = Sampling(temperature=temperature, max_new_tokens=60, ignore_eos=True, seed=7)
    prompts = ragged_prompts([3] * 32)
    engine.generate(prompts, sampling)
    stats = engine.generate(prompts, sampling).stats
    for tried, accepted in zip(stats.tried_at[:3], stats.accepted_at[:3], strict=True):
        assert tried > 60
        error = sqrt(acceptance * (1 - acceptance) / tried)
        assert abs(accepted / tried - acceptance) < 4.5 * error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rehearsal_drafts_nothing_and_changes_no_output(temperature: float) -> None:
    """Also in batches whose rows join and leave."""
    engine = synthetic(0.7, max_batch_size=3)
    sampling = [
        Sampling(temperature=temperature, max_new_tokens=n, ignore_eos=True) for n in (9, 21, 5, 30)
    ]
    plain = engine_of(TARGET).generate(PROMPTS, sampling)
    first, second = engine.generate(PROMPTS, sampling), engine.generate(PROMPTS, sampling)
    assert token_ids(first) == token_ids(second) == token_ids(plain)
    assert first.stats.drafted == 0
    assert second.stats.accepted > 20


def test_rates_of_one_and_zero() -> None:
    for acceptance, expected in ((1.0, 5), (0.0, 1)):
        engine = synthetic(acceptance)
        for _ in range(2):
            stats = engine.generate([[1, 2, 3]], greedy(50)).stats
        assert stats.acceptance_length == pytest.approx(expected, rel=0.05)


def test_another_temperature_is_a_rehearsal_of_its_own() -> None:
    """Where the output differs from the recorded one, the drafter drafts nothing from there on."""
    engine = synthetic(1.0)
    hot = Sampling(temperature=1.0, max_new_tokens=40, ignore_eos=True)
    engine.generate(PROMPTS[:1], hot)
    other = engine.generate(PROMPTS[:1], greedy(40))
    assert other.stats.drafted <= 8
    assert engine.generate(PROMPTS[:1], greedy(40)).stats.acceptance_rate == 1
    assert token_ids(other) == token_ids(engine_of(TARGET).generate(PROMPTS[:1], greedy(40)))


def test_a_longer_output_is_drafted_as_far_as_it_was_recorded() -> None:
    engine = synthetic(1.0)
    engine.generate(PROMPTS[:1], greedy(12))
    longer = engine.generate(PROMPTS[:1], greedy(40)).stats
    assert 0 < longer.accepted < 12
    assert engine.generate(PROMPTS[:1], greedy(40)).stats.accepted > 25


def test_contract() -> None:
    check_drafter(rehearsed(0.5, (1, 2, 0, 1), (0, 1, 2)), 3, prompts=[(0, 1, 2), (2,), (1, 1)])


@pytest.mark.parametrize("verifier", [Rejection(), Block()], ids=["rejection", "block"])
def test_any_lossless_rule_keeps_the_distribution(verifier: Rejection | Block) -> None:
    """ENUM, including the drafter's own random numbers."""
    drafter = rehearsed(0.4, (2, 0, 1, 1), (0, 1, 2))
    done = enumerate_round(ToyModel.random(3, seed=5), drafter, verifier, 2, prompt=(0, 1, 2))
    assert done.total_variation < 1e-12
    assert done.acceptance_length > 1


def test_the_method_verifies_by_the_shared_noise() -> None:
    assert isinstance(synthetic(0.5).verifier, Coupled)


@pytest.mark.parametrize("acceptance", [-0.1, 1.5, float("nan")])
def test_a_rate_outside_its_range(acceptance: float) -> None:
    with pytest.raises(InvalidParameterError, match="acceptance="):
        Synthetic(5, acceptance)
