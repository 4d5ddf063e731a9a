"""Children of many nodes at once, against draws made one by one.

Legend: B rows, n nodes, k children, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from outrider.core import draw
from outrider.drafters.tree.children import independent, top, without_replacement


def distributions(B: int, n: int, V: int, seed: int, *, impossible: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q_BnV = torch.rand(B, n, V, generator=generator, dtype=torch.float64) ** 3
    gone_BnV = torch.rand(B, n, V, generator=generator) < impossible
    gone_BnV[..., V // 2] = False
    q_BnV = q_BnV.masked_fill(gone_BnV, 0.0)
    return q_BnV / q_BnV.sum(-1, keepdim=True)


def numbers(B: int, n: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u_Bnk = torch.rand(B, n, k, generator=generator, dtype=torch.float64)
    u_Bnk[0] = 0.0  # the corners of the cube
    u_Bnk[1] = 1 - 2.0**-52
    return u_Bnk


def one_by_one(q_V: Tensor, u_k: Tensor) -> list[int]:
    """Draws, removes, renormalises and draws again until no token is left."""
    tokens: list[int] = []
    for u in u_k:
        if float(q_V.sum()) == 0:
            break
        token = int(draw(q_V[None] / q_V.sum(), u[None])[0])
        q_V = q_V.clone()
        q_V[token] = 0
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("impossible", [0.0, 0.6])
@pytest.mark.parametrize(("V", "k"), [(3, 2), (5, 7), (40, 12), (1000, 5)])
def test_draws_without_replacement(V: int, k: int, impossible: float) -> None:
    """The same numbers give the same tokens as draws one by one, and end with q's support."""
    q_BnV, u_Bnk = distributions(400, 2, V, 0, impossible=impossible), numbers(400, 2, k)
    token_Bnk, exists_Bnk = without_replacement(q_BnV, u_Bnk)
    for b in range(400):
        for i in range(2):
            expected = one_by_one(q_BnV[b, i], u_Bnk[b, i])
            assert token_Bnk[b, i][exists_Bnk[b, i]].tolist() == expected
            assert int(exists_Bnk[b, i].long().cumprod(0).sum()) == len(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_possible_token_is_drawn_once(dtype: torch.dtype) -> None:
    """As many children as tokens: all possible tokens once, however improbable."""
    V = 50
    q_BnV = torch.logspace(0, -30, V, dtype=torch.float64).flip(0).expand(200, 1, V)
    q_BnV = (q_BnV / q_BnV.sum(-1, keepdim=True)).to(dtype)
    token_Bnk, exists_Bnk = without_replacement(q_BnV, numbers(200, 1, V))
    for tokens, exists in zip(token_Bnk[:, 0], exists_Bnk[:, 0], strict=True):
        assert sorted(tokens[exists].tolist()) == list(range(V))


@pytest.mark.parametrize("V", [1000, 9000])
def test_after_a_nearly_certain_token_the_others_keep_their_shares(V: int) -> None:
    """The rest of a distribution beside a token of probability 1 - 1e-14 is drawn from correctly;
    by subtraction it would be rounding error."""
    q_BnV = distributions(400, 1, V, 2) * 1e-14
    q_BnV[..., 300] = 1.0
    u_Bnk = numbers(402, 1, 3)[2:]
    token_Bnk, exists_Bnk = without_replacement(q_BnV, u_Bnk)
    assert bool(exists_Bnk.all())
    assert bool((token_Bnk[:, 0, 0] == 300).all())
    for b in range(400):
        assert token_Bnk[b, 0].tolist() == one_by_one(q_BnV[b, 0], u_Bnk[b, 0])


def test_independent_draws_are_those_of_draw() -> None:
    q_BnV, u_Bnk = distributions(300, 3, 9, 1, impossible=0.5), numbers(300, 3, 4)
    token_Bnk = independent(q_BnV, u_Bnk)
    for i in range(3):
        for j in range(4):
            assert torch.equal(token_Bnk[:, i, j], draw(q_BnV[:, i], u_Bnk[:, i, j]))
    assert bool((q_BnV.gather(2, token_Bnk) > 0).all())


def test_the_top_tokens_in_order() -> None:
    z_BnV = torch.tensor([[[0.5, -torch.inf, 2.0], [1.0, 3.0, 2.0]]])
    token_Bnk, exists_Bnk = top(z_BnV, 4)
    assert token_Bnk[0, 0, :2].tolist() == [2, 0]
    assert token_Bnk[0, 1, :3].tolist() == [1, 2, 0]
    assert exists_Bnk[0].tolist() == [[True, True, False, False], [True, True, True, False]]
    assert top(z_BnV, 2)[0][0].tolist() == [[2, 0], [1, 2]]
