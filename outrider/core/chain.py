"""Chains: the loop in which a model drafts one, and the constant tensors of their structure.

    x_i = choice of z_i,   z_i the logits after … x_{i-1},   i = 1 … γ

The loop is the same eagerly and compiled.

Every round needs dozens of small constant tensors, and creating one takes a few microseconds, so
they are cached. All rows of a batch share the memory of one row: nobody may write into them. They
are created outside of inference mode, even when first requested inside it, so that gradients can
flow through computations that use them.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.recording import CAPTURE

Step = Callable[[Sequence[Tensor]], Tensor]
"""From the tokens so far, root first, each (B,), to the logits after the last one, (B, V)."""

Choice = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""From logits (B, V) and the tokens so far, root first, to what is recorded of the logits (B, V)
and the next token (B,)."""

GoesOn = Callable[[Tensor, Tensor], bool]
"""From what was just recorded (B, V) and chosen (B,) to whether any row drafts another token."""


class ChainTensors(NamedTuple):
    """The structure of B chains of N nodes, all of which exist.

    Attributes:
        parents_BN: -1 for the root, otherwise the preceding node.
        mask_BN: all true.
        depth_BN: 0 … N-1.
        path_BD: the drafted nodes, 1 … N-1.
        num_drafted_B: N-1.
    """

    parents_BN: Tensor
    mask_BN: Tensor
    depth_BN: Tensor
    path_BD: Tensor
    num_drafted_B: Tensor


def chain_tensors(B: int, N: int, device: torch.device) -> ChainTensors:
    """The structure of B full chains of N nodes. Read-only."""
    is_recorded = CAPTURE.kept is not None or torch.compiler.is_compiling()
    make = _chain_tensors if is_recorded else _cached_chain_tensors
    return make(B, N, device)


def chain_tensors_like(tokens_BN: Tensor) -> ChainTensors:
    """The structure of full chains of the given shape and device. Read-only."""
    B, N = tokens_BN.shape
    return chain_tensors(B, N, tokens_BN.device)


def cached_arange(num: int, device: torch.device, step: int = 1) -> Tensor:
    """The first ``num`` multiples of ``step``, starting at 0, shape (num,). Read-only."""
    is_recorded = CAPTURE.kept is not None or torch.compiler.is_compiling()
    make = _arange if is_recorded else _cached_arange
    return make(num, device, step)


def draft_chain(
    root_B: Tensor, depth: int, step: Step, choose: Choice, goes_on: GoesOn | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Drafts up to ``depth`` tokens after a root.

    Args:
        root_B: the last committed token of each row.
        depth: γ.
        step: the model.
        choose: picks a token.
        goes_on: whether to draft another token; None drafts all γ.

    Returns:
        The tokens from the root on, each (B,), and what was recorded for each drafted token,
        (B, V).
    """
    tokens, recorded = [root_B], []
    for _ in range(depth):
        row_BV, x_B = choose(step(tokens), tokens)
        tokens.append(x_B)
        recorded.append(row_BV)
        if goes_on is not None and not goes_on(row_BV, x_B):
            break
    return tokens, recorded


def with_leaf(recorded: Sequence[Tensor]) -> Tensor:
    """What was recorded, (B, N, V), with zeros for the last token, which has no children."""
    return torch.stack([*recorded, torch.zeros_like(recorded[-1])], 1)


def _chain_tensors(B: int, N: int, device: torch.device) -> ChainTensors:
    depth_N = cached_arange(N, device)
    depth_BN = depth_N.expand(B, N)
    return ChainTensors(
        (depth_N - 1).expand(B, N),
        torch.ones(1, N, dtype=torch.bool, device=device).expand(B, N),
        depth_BN,
        depth_BN[:, 1:],
        depth_N[-1:].expand(B),
    )


def _arange(num: int, device: torch.device, step: int = 1) -> Tensor:
    return torch.arange(0, num * step, step, device=device)


_cached_chain_tensors = lru_cache(maxsize=256)(torch.inference_mode(False)(_chain_tensors))
_cached_arange = lru_cache(maxsize=256)(torch.inference_mode(False)(_arange))
