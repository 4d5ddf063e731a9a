"""The exponential race: its noise, its distribution, and the search that opens few blocks.

Legend: B rows, V vocabulary, G blocks of tokens.
"""

import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.core import Stream, race, row_keys
from outrider.core.race import _BLOCK_SIZE, _minima, _open
from outrider.testing import chi2_p_value


def stream(num_rows: int, position: int = 7, seed: int = 0) -> Stream:
    return Stream(row_keys([seed] * num_rows, list(range(num_rows)), "cpu"), torch.tensor(position))


def noise(rng: Stream, num_tokens: int) -> Tensor:
    """The Exp(1) numbers of tokens 0 … V-1, all blocks opened, (B, V)."""
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    block_BG = torch.arange(num_blocks).expand(rng.key_B.shape[0], num_blocks)
    return _open(rng, _minima(rng, block_BG), block_BG).flatten(1)[:, :num_tokens]


def distributions(num_rows: int, num_tokens: int, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(num_rows, num_tokens, generator=generator)).softmax(-1)


def test_the_noise_is_exponential_and_independent_across_tokens() -> None:
    """Kolmogorov-Smirnov per token of three blocks, and correlations; false alarm about 1e-4."""
    E_BV = noise(stream(20_000), 40)
    for E_B in E_BV.unbind(1):
        assert stats.kstest(E_B.numpy(), "expon").pvalue > 1e-4 / 40
    correlation_VV = torch.corrcoef(E_BV.T) - torch.eye(40, dtype=torch.float64)
    assert float(correlation_VV.abs().max()) < 6 / 20_000**0.5


@pytest.mark.slow
def test_draws_have_the_distribution() -> None:
    """False alarm with probability 1e-4."""
    p_V = torch.tensor([0.1, 0.2, 0.05, 0.6, 0.0, 0.05], dtype=torch.float64)
    token_B = race(p_V.expand(200_000, 6), stream(200_000))
    assert chi2_p_value(torch.bincount(token_B, minlength=6), p_V) > 1e-4


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_opening_few_blocks_finds_the_same_winner(scale: float) -> None:
    """The fast search equals the exhaustive one, with many more blocks than it opens; flat
    distributions sometimes need all blocks."""
    p_BV = distributions(300, 5000, scale)
    rng = stream(300)
    assert (race(p_BV, rng) == (noise(rng, 5000) / p_BV).argmin(1)).all()


def test_noise_is_keyed_by_the_token() -> None:
    """Vocabulary size and batch do not change the noise; the position does."""
    rng = stream(3)
    assert (noise(rng, 100) == noise(rng, 37 + 100)[:, :100]).all()
    alone = Stream(rng.key_B[1:2], rng.position_B)
    assert (noise(alone, 100) == noise(rng, 100)[1]).all()
    assert (noise(rng.at(torch.tensor(8)), 100) != noise(rng, 100)).all()


def test_impossible_tokens_never_win() -> None:
    p_BV = torch.zeros(1000, 33)
    p_BV[:, 32] = 1e-30
    assert (race(p_BV, stream(1000)) == 32).all()


@pytest.mark.slow
def test_two_distributions_agree_as_often_as_the_formula_says() -> None:
    """P(x = y = v) = 1 / Σ_w max(p_w/p_v, q_w/q_v), at least (1 - TV) / (1 + TV) in all.
    False alarm with probability 1e-4."""
    p_V, q_V = distributions(2, 6, 1.5, seed=3).double()
    together_VV = torch.maximum(p_V / p_V[:, None], q_V / q_V[:, None])
    agree_V = 1 / together_VV.sum(1)
    tv = 0.5 * float((p_V - q_V).abs().sum())
    assert float(agree_V.sum()) >= (1 - tv) / (1 + tv)
    rng = stream(200_000)
    x_B, y_B = race(q_V.expand(200_000, 6), rng), race(p_V.expand(200_000, 6), rng)
    cell_B = torch.where(x_B == y_B, y_B, 6)
    expected_V = torch.cat([agree_V, 1 - agree_V.sum()[None]])
    assert chi2_p_value(torch.bincount(cell_B, minlength=7), expected_V) > 1e-4
