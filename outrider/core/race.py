"""Draws by an exponential race: noise that belongs to the token, whatever the distribution.

    argmax_v ( log p(v) + G_v )  =  argmin_v E_v / p(v),     E_v ~ Exp(1),  G_v = -log E_v

is a draw from p (the Gumbel-max trick). Two distributions that race with the same noise draw the
same token with probability at least (1 - TV) / (1 + TV), and neither needs to know the other
(Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding", 2024).

The noise of a whole vocabulary would cost a hash and a logarithm per token. Here it comes in
blocks of S tokens: of S independent Exp(1) numbers the least is Exp(S), falls on each token alike,
and what the others have beyond it is Exp(1) again. So a block's least number costs one hash and
bounds all its tokens from below, and only blocks whose bound beats the best token need be opened.

Legend: B rows, V vocabulary, G blocks, S tokens of a block, K opened blocks.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core.rng import Role, Stream, as_uniform

_S = 16
_OPENED = 96
_TOKENS = 1 << 32  # numbers from here on belong to tokens, those below to blocks


def race(weights_BV: Tensor, rng: Stream) -> Tensor:
    """Token v with probability proportional to ``weights[b, v]``, shape (B,).

    Equal streams give equal noise. A token of weight zero is never drawn (unless all are zero).
    """
    weights_BGS = _blocks(weights_BV)
    G = weights_BGS.shape[1]
    bound_BG = _least(rng, torch.arange(G, device=weights_BV.device))[0] / weights_BGS.amax(-1)
    if G > _OPENED and weights_BV.device.type == "cpu":  # elsewhere a look back costs more
        bound_BK, block_BK = bound_BG.topk(_OPENED + 1, largest=False)
        time_B, token_B = _fastest(weights_BGS, rng, block_BK[:, :-1])
        if bool((time_B < bound_BK[:, -1]).all()):
            return token_B
    every_BG = torch.arange(G, device=weights_BV.device).expand(weights_BV.shape[0], G)
    return _fastest(weights_BGS, rng, every_BG)[1]


def _fastest(weights_BGS: Tensor, rng: Stream, block_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The least E/p within the opened blocks, and its token."""
    S = weights_BGS.shape[2]
    weights_BKS = weights_BGS.gather(1, block_BK[..., None].expand(-1, -1, S))
    time_BR = (_opened(rng, block_BK) / weights_BKS).flatten(1)
    time_B, index_B = time_BR.min(1)
    return time_B, block_BK.gather(1, index_B[:, None] // S)[:, 0] * S + index_B % S


def _opened(rng: Stream, block_BK: Tensor) -> Tensor:
    """The numbers of all tokens of these blocks, (B, K, S)."""
    least_BK, winner_BK = _least(rng, block_BK)
    place_S = torch.arange(_S, device=block_BK.device)
    token_BR = (block_BK[..., None] * _S + place_S).flatten(1)
    extra_BKS = _exponential(rng.bits(Role.NOISE, token_BR + _TOKENS)).view(*block_BK.shape, _S)
    return least_BK[..., None] + extra_BKS.masked_fill(place_S == winner_BK[..., None], 0.0)


def _least(rng: Stream, block_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The least number of each block, and the place of the token that has it."""
    bits_BK = rng.bits(Role.NOISE, block_BK)
    return _exponential(bits_BK) / _S, bits_BK % _S  # the low bits are no part of the uniform


def _exponential(bits: Tensor) -> Tensor:
    """Exp(1) numbers, never 0."""
    u = as_uniform(bits)
    return (-torch.log1p(-u)).clamp(min=torch.finfo(u.dtype).tiny)


def _blocks(weights_BV: Tensor) -> Tensor:
    """Blocks of S tokens, the last one filled up with weights of zero."""
    missing = -weights_BV.shape[1] % _S
    padded_BV = pad(weights_BV, (0, missing)) if missing else weights_BV
    return padded_BV.view(padded_BV.shape[0], -1, _S)
