"""The loop in which a model drafts a chain, token by token: the same eagerly and compiled.

    x_i = choice of z_i,   z_i the logits after … x_{i-1},   i = 1 … γ

Legend: B rows, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[Sequence[Tensor]], Tensor]
"""From the tokens so far, root first, each (B,), to the logits after the last one, (B, V)."""

Choice = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""From logits (B, V) and the tokens so far, root first, to what is recorded of the logits (B, V)
and the next token (B,)."""

GoesOn = Callable[[Tensor, Tensor], bool]
"""From what was just recorded (B, V) and chosen (B,) to whether any row drafts another token."""


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
