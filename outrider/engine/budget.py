"""The draft budget: how many tokens each row may draft in the coming round.

Legend: B rows.
"""

from collections.abc import Sequence

import torch

from outrider.core import Budget, to_device
from outrider.core.errors import InvalidParameterError
from outrider.core.values import is_whole, shown

MAX_SPECULATIVE_TOKENS = 64


def plan(num_speculative_tokens: int, room: Sequence[int], device: torch.device) -> Budget:
    """At most ``num_speculative_tokens``, and one less than the row may still emit.

    Args:
        num_speculative_tokens: γ.
        room: tokens each row may still emit (at least 1); the round's last one is not drafted.
        device: the drafter's.
    """
    tokens = [min(num_speculative_tokens, left - 1) for left in room]
    most = max(tokens)
    if min(tokens) == most:
        return Budget(most)
    return Budget(most, to_device(torch.tensor(tokens), device))


def check_speculative_tokens(number: int | None) -> None:
    """Raises InvalidParameterError unless the number is None or a valid γ."""
    if number is not None:
        check_range("num_speculative_tokens", number, MAX_SPECULATIVE_TOKENS)


def check_range(name: str, value: int, most: int) -> None:
    """Raises InvalidParameterError unless the value is a whole number from 1 to the most."""
    if not is_whole(value) or not 1 <= value <= most:
        raise InvalidParameterError(
            f"{name}={shown(value)}: must be a whole number from 1 to {most}"
        )
