"""What all full chains of a shape have in common, and the numbers 0, 1, 2, …

Kept, since making them anew costs more than looking them up: a few microseconds for each tensor, of
which a round would make dozens. All rows share one, so nobody may write into them. They are
ordinary tensors, whoever asks first, so that gradients may flow around them.

Legend: B rows, N nodes, D drafted tokens (N-1).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class ChainTensors(NamedTuple):
    """Chains of N nodes, all of which exist, in B rows.

    Attributes:
        parents_BN: -1 for the root, else the node before.
        mask_BN: true.
        depth_BN: 0 … N-1.
        path_BD: the nodes behind the root, 1 … N-1.
        num_drafted_B: N-1.
    """

    parents_BN: Tensor
    mask_BN: Tensor
    depth_BN: Tensor
    path_BD: Tensor
    num_drafted_B: Tensor


def chain_tensors(B: int, N: int, device: torch.device) -> ChainTensors:
    """The parts of B full chains of N nodes."""
    make = _chain_tensors if torch.compiler.is_compiling() else _cached_chain_tensors
    return make(B, N, device)


def full_chains(tokens_BN: Tensor) -> ChainTensors:
    """The parts of full chains of these tokens."""
    B, N = tokens_BN.shape
    return chain_tensors(B, N, tokens_BN.device)


def counting(num: int, device: torch.device, step: int = 1) -> Tensor:
    """The first ``num`` multiples of ``step``, from 0 on, shape (num,)."""
    make = _counting if torch.compiler.is_compiling() else _kept_counting
    return make(num, device, step)


def _chain_tensors(B: int, N: int, device: torch.device) -> ChainTensors:
    depth_N = counting(N, device)
    depth_BN = depth_N.expand(B, N)
    return ChainTensors(
        (depth_N - 1).expand(B, N),
        torch.ones(1, N, dtype=torch.bool, device=device).expand(B, N),
        depth_BN,
        depth_BN[:, 1:],
        depth_N[-1:].expand(B),
    )


def _counting(num: int, device: torch.device, step: int = 1) -> Tensor:
    return torch.arange(0, num * step, step, device=device)


_cached_chain_tensors = lru_cache(maxsize=256)(torch.inference_mode(False)(_chain_tensors))
_kept_counting = lru_cache(maxsize=256)(torch.inference_mode(False)(_counting))
