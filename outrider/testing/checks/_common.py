"""Helpers of the contract checks.

Legend: B rows, N nodes, D drafted tokens (N-1).
"""

import torch
from torch import Tensor

from outrider.core import Acceptance, Context, Draft, Verdict, path_to

PROMPT_LENGTHS = (1, 5, 3, 8)


def require(ok: bool, message: str) -> None:
    """Raises AssertionError with this message unless ``ok``."""
    if not ok:
        raise AssertionError(message)


def holds(ok: Tensor) -> bool:
    """Whether all entries are true."""
    return bool(ok.all())


def random_prompts(vocab_size: int, generator: torch.Generator) -> list[list[int]]:
    """Random prompts of different lengths."""
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


def verdict_at(draft: Draft, node_B: Tensor, next_token_B: Tensor) -> Acceptance:
    """A verdict that accepts the path to a node, or as much of it as exists."""
    path_BD = path_to(draft, node_B)
    depth_B = draft.depth_BN.gather(1, node_B[:, None])[:, 0]
    exists_BD = draft.mask_BN.gather(1, path_BD).long().cumprod(1)
    return Verdict(path_BD, torch.minimum(depth_B, exists_BD.sum(1)), next_token_B).read()


def advance(context: Context, draft: Draft, verdict: Acceptance) -> None:
    """Appends what was emitted."""
    context.append(verdict.emitted(draft), verdict.num_emitted)
