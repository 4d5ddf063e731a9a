"""Temperature: logits divided by a number per row.

    p = softmax(z / T)

Legend: B rows, V vocabulary.
"""

from torch import Tensor


def scaled(logits: Tensor, temperature_B: Tensor) -> Tensor:
    """Logits (B, …, V) divided by each row's temperature, in the dtype of the logits."""
    ones = (1,) * (logits.ndim - 1)
    return logits / temperature_B.to(logits.dtype).view(-1, *ones)


def softmax_at(logits: Tensor, temperature_B: Tensor) -> Tensor:
    """The distributions softmax(z / T), shaped as the logits (B, …, V)."""
    return scaled(logits, temperature_B).softmax(-1)
