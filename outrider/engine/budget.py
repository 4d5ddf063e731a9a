"""How many tokens each row may draft in the coming round.

Legend: B rows.
"""

from collections.abc import Sequence

import torch

from outrider.core import Budget


def plan(num_speculative_tokens: int, room: Sequence[int], device: torch.device) -> Budget:
    """At most ``num_speculative_tokens``, and one less than the row may still emit.

    Args:
        num_speculative_tokens: γ.
        room: tokens each row may still emit (at least 1); the round's last one is not drafted.
        device: where the drafter works.
    """
    tokens = [min(num_speculative_tokens, left - 1) for left in room]
    most = max(tokens)
    if min(tokens) == most:
        return Budget(most)
    return Budget(most, torch.tensor(tokens, device=device))
