"""Random drafts: drawn from the declared distributions, and verified exactly."""

import math

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.random import RandomDrafter
from outrider.testing import ToyModel, check_drafter, enumerate_round
from outrider.verifiers import Block, Rejection


@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_contract(spread: float) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    check_drafter(RandomDrafter(5, spread, dtype=torch.float64), 5)


@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("verifier", [Rejection(), Block()], ids=["rejection", "block"])
def test_a_round_has_exactly_the_targets_distribution(
    verifier: Rejection | Block, spread: float
) -> None:
    """ENUM."""
    drafter = RandomDrafter(3, spread, dtype=torch.float64)
    done = enumerate_round(ToyModel.random(3, seed=3), drafter, verifier, 3)
    assert done.total_variation < 1e-12


def test_distributions_differ_by_position_unless_uniform() -> None:
    q_EV = RandomDrafter(50, 2.0).q_EV
    assert len({tuple(row) for row in q_EV.tolist()}) > 10
    torch.testing.assert_close(RandomDrafter(50, 0.0).q_EV, torch.full((1, 50), 1 / 50))


@pytest.mark.parametrize("method", ["random", "uniform"])
def test_greedy_output_is_that_of_plain_decoding(method: str) -> None:
    target = tiny("qwen3", vocab_size=7)
    prompts = ragged_prompts([4, 1, 11], 7)
    found = engine_of(target, None, method, 3, max_batch_size=2).generate(prompts, greedy(20))
    assert token_ids(found) == token_ids(engine_of(target).generate(prompts, greedy(20)))
    assert 0 < found.stats.acceptance_rate < 0.5


@pytest.mark.parametrize("spread", [-1.0, math.inf, math.nan])
def test_a_spread_outside_its_range(spread: float) -> None:
    with pytest.raises(InvalidParameterError, match="spread="):
        RandomDrafter(5, spread)
