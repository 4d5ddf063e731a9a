"""The shape of a draft that is trained from scratch, and what it costs beside its target.

Decoding one token reads every parameter once, except that an embedding table is read at one row
only, unless the output head is tied to it.  Where memory bandwidth decides, the ratio of the
parameters read is the cost ratio c of draft and target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from outrider.core.errors import InvalidParameterError

_FRACTIONS = (1, 3 / 4, 2 / 3, 1 / 2, 3 / 8, 1 / 3, 1 / 4, 3 / 16, 1 / 8, 1 / 16)
_CLOSE = 0.1  # relative deviation from the cost asked for at which the widest draft is taken


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama with tied embeddings."""

    layers: int
    width: int

    def __post_init__(self) -> None:
        for name in ("layers", "width"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidParameterError(f"{name} is {value}; it must be at least 1")
        if self.width % 8:
            raise InvalidParameterError(f"width is {self.width}; it must be a multiple of 8")

    @property
    def heads(self) -> int:
        """As many heads as give each 64 numbers, or fewer where the width is small."""
        sizes = (s for s in (64, 48, 32, 16) if self.width % s == 0 and self.width >= 2 * s)
        size = next(sizes, 8)
        return self.width // size

    @property
    def kv_heads(self) -> int:
        """A third or half of the heads where that divides them, else all."""
        return next((self.heads // n for n in (3, 2) if self.heads % n == 0), self.heads)

    @property
    def ffn(self) -> int:
        """Eight thirds of the width, as a multiple of 32."""
        return max(32, round(self.width * 8 / 3 / 32) * 32)

    def read(self, vocab_size: int) -> int:
        """Parameters read per token."""
        head = self.width // self.heads
        attention = 2 * self.width * head * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.ffn + 2 * self.width
        return self.layers * layer + vocab_size * self.width + self.width


def parameters_read(model: PreTrainedModel) -> int:
    """Parameters read per token: all, less an embedding table that is not the output head."""
    total = sum(parameter.numel() for parameter in model.parameters())
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = head is None or table.weight is head.weight
    return total if tied else total - table.weight.numel()


def shape_for_cost(target: PreTrainedModel, ratio: float) -> Shape:
    """The shape whose parameters read per token are about `ratio` times the target's.

    Of the shapes within a tenth of it, the widest: a layer costs time beyond its parameters, and a
    draft as wide as the target starts from its embeddings.  Else the nearest.

    Raises:
        InvalidParameterError: a ratio outside (0, 1), or below that of the smallest draft.
    """
    if not 0 < ratio < 1:
        raise InvalidParameterError(f"cost_ratio={ratio}: must be above 0 and below 1")
    text = target.config.get_text_config()
    budget = ratio * parameters_read(target)
    widths = sorted({max(8, round(text.hidden_size * f / 8) * 8) for f in _FRACTIONS}, reverse=True)
    shapes = [
        Shape(layers, width) for width in widths for layers in range(1, text.num_hidden_layers + 1)
    ]
    off = {shape: abs(shape.read(text.vocab_size) / budget - 1) for shape in shapes}
    nearest = min(shapes, key=lambda shape: off[shape])
    smallest = min(shapes, key=lambda shape: shape.read(text.vocab_size))
    if smallest.read(text.vocab_size) > (1 + _CLOSE) * budget:
        least = smallest.read(text.vocab_size) / parameters_read(target)
        raise InvalidParameterError(
            f"cost_ratio={ratio}: the output head over {text.vocab_size:,} tokens alone costs "
            f"more; the smallest draft has {least:.3f}"
        )
    for width in widths:
        close = [shape for shape in shapes if shape.width == width and off[shape] <= _CLOSE]
        if close:
            return min(close, key=lambda shape: off[shape])
    return nearest
