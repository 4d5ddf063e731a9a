"""Sampling by an exponential race, with noise keyed by the token and not by the distribution.

    argmax_v ( log p(v) + G_v )  =  argmin_v E_v / p(v),     E_v ~ Exp(1),  G_v = -log E_v

is a draw from p (the Gumbel-max trick). Two distributions sampled with the same noise draw the same
token with probability at least (1 - TV) / (1 + TV), and neither needs to know the other (Daliri,
Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
2024).

Noise for a whole vocabulary would cost a hash and a logarithm per token, so it is generated in
blocks of W tokens. The minimum of W independent Exp(1) numbers has the distribution Exp(W), falls
on each token with equal probability, and the excess of the other numbers over it is again Exp(1).
A block's minimum therefore costs one hash and bounds all its tokens from below, and only blocks
whose bound beats the best token so far have to be opened, that is, have all their noise generated.

Legend: B rows, V vocabulary, G blocks of consecutive tokens, W tokens of a block, O opened blocks.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core.repeat import repeat_while
from outrider.core.rng import Role, Stream, as_uniform

_BLOCK_SIZE = 16
_MAX_OPENED = 96
_FIRST_TOKEN = 1 << 32  # counters from here on are keyed by token, those below by block


def race(weights_BV: Tensor, rng: Stream) -> Tensor:
    """Token v with probability proportional to ``weights[b, v]``, shape (B,).

    Equal streams give equal noise. A token of weight zero is never drawn (unless all are zero).
    """
    weights_BGW = _blocks(weights_BV)
    G = weights_BGW.shape[1]
    # Inductor folds arithmetic on an arange into expressions of indices, which fail where a product
    # exceeds 64 bits, as those of the hash do. Adding a number that is read from memory, here 0,
    # makes it compute with tensors.
    all_BG = torch.arange(G, device=weights_BV.device) + (rng.key_B[:, None] & 0)
    minima = _minima(rng, all_BG)
    bound_BG = minima[0] / weights_BGW.amax(-1)
    # elsewhere synchronising costs more than reading all blocks
    most = _MAX_OPENED if weights_BV.device.type == "cpu" else G
    bound_BO, block_BO = bound_BG.topk(min(G, most + 1), largest=False)
    if most >= G:
        return _fastest(weights_BGW, rng, minima, block_BO)[1]
    time_B, token_B = _fastest(weights_BGW, rng, minima, block_BO[:, :-1])
    won_B = time_B < bound_BO[:, -1]

    def is_open(_: Tensor, won_B: Tensor) -> Tensor:
        return ~won_B.all()

    def open_all(_: Tensor, won_B: Tensor) -> tuple[Tensor, Tensor]:
        block_BG = bound_BG.topk(G, largest=False)[1]  # in memory, where no product is an index
        return _fastest(weights_BGW, rng, minima, block_BG)[1], torch.ones_like(won_B)

    return repeat_while(is_open, open_all, (token_B, won_B), at_most=1)[0]


def _fastest(
    weights_BGW: Tensor, rng: Stream, minima: tuple[Tensor, Tensor], block_BO: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest E/p within the opened blocks, and its token; ``minima`` are those of all
    blocks."""
    W = weights_BGW.shape[2]
    weights_BOW = weights_BGW.gather(1, block_BO[..., None].expand(-1, -1, W))
    time_B, index_B = (_open(rng, minima, block_BO) / weights_BOW).flatten(1).min(1)
    return time_B, block_BO.gather(1, index_B[:, None] // W)[:, 0] * W + index_B % W


def _open(rng: Stream, minima: tuple[Tensor, Tensor], block_BO: Tensor) -> Tensor:
    """The noise of all tokens of these blocks, (B, O, W)."""
    minimum_BO, winner_BO = (each_BG.gather(1, block_BO) for each_BG in minima)
    index_W = torch.arange(_BLOCK_SIZE, device=block_BO.device)
    token_BOW = block_BO[..., None] * _BLOCK_SIZE + index_W
    extra_BOW = _exponential(
        rng.bits(Role.NOISE, token_BOW.flatten(1) + _FIRST_TOKEN).view_as(token_BOW)
    )
    return minimum_BO[..., None] + extra_BOW.masked_fill(index_W == winner_BO[..., None], 0.0)


def _minima(rng: Stream, block_BO: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest noise of each block, and which token of the block it belongs to."""
    bits_BO = rng.bits(Role.NOISE, block_BO)
    winner_BO = bits_BO % _BLOCK_SIZE  # the low bits, which the uniform number does not use
    return _exponential(bits_BO) / _BLOCK_SIZE, winner_BO


def _exponential(bits: Tensor) -> Tensor:
    """Exp(1) numbers from random bits, never 0."""
    u = as_uniform(bits)
    return (-torch.log1p(-u)).clamp(min=torch.finfo(u.dtype).tiny)


def _blocks(weights_BV: Tensor) -> Tensor:
    """The weights in blocks, (B, G, W); the last block is padded with weights of zero."""
    missing = -weights_BV.shape[1] % _BLOCK_SIZE
    padded_BV = pad(weights_BV, (0, missing)) if missing else weights_BV
    return padded_BV.view(padded_BV.shape[0], -1, _BLOCK_SIZE)
