"""Bounds for whole sequences from bounds per token, compared with products of distributions.

Legend: V vocabulary, S sequences of n tokens.
"""

import pytest
import torch
from torch import Tensor

from outrider.core import LOSSLESS, Bound
from outrider.core.divergences import divergences


def pair(scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(3, generator=generator, dtype=torch.float64)
    noise_V = torch.randn(3, generator=generator, dtype=torch.float64)
    return logits_V.softmax(-1), (logits_V + scale * noise_V).softmax(-1)


def sequences(p_V: Tensor, n: int) -> Tensor:
    p_S = torch.ones(1, dtype=torch.float64)
    for _ in range(n):
        p_S = (p_S[:, None] * p_V).flatten()
    return p_S


@pytest.mark.parametrize("divergence", ["kl", "rkl", "tv", "chi2"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_sequences_of_independent_tokens(divergence: str, scale: float) -> None:
    """KL and χ² are met exactly, total variation is bounded."""
    p_V, pi_V = pair(scale)
    per_token = float(getattr(divergences(p_V, pi_V), divergence))
    bound = Bound("test", divergence, per_token)  # type: ignore[arg-type]
    for n in range(1, 6):
        exact = float(getattr(divergences(sequences(p_V, n), sequences(pi_V, n)), divergence))
        limit = bound.per_sequence(n)
        assert limit is not None
        assert exact <= limit * (1 + 1e-9) + 1e-12
        if divergence != "tv":
            assert exact == pytest.approx(limit, rel=1e-9)


def test_lossless_and_unbounded() -> None:
    assert LOSSLESS.lossless
    assert LOSSLESS.per_sequence(1000) == 0
    threshold = Bound("meets a threshold", threshold=0.3)
    assert not threshold.lossless
    assert threshold.per_sequence(10) is None
    assert Bound("everything", "tv", 2.0).per_sequence(3) == 1.0
