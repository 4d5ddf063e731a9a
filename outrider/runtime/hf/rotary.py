"""Rotary positions as a model's config describes them, for networks of our own.

Legend: B rows, N tokens, H heads, C width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half


class Rotation(NamedTuple):
    """The rotation of each position."""

    cos_BNC: Tensor
    sin_BNC: Tensor

    def __call__(self, x_BHNC: Tensor) -> Tensor:
        """Rotates queries or keys; same shape."""
        rotated: Tensor = (
            x_BHNC * self.cos_BNC[:, None] + rotate_half(x_BHNC) * self.sin_BNC[:, None]
        )
        return rotated


class RotaryEmbedding:
    """Rotations by position, of whatever type the config names (``rope_parameters``).

    Not a module: its frequencies stay in float32 when a network around it is cast. They move to the
    device of the positions.

    Args:
        config: the config of a decoder with rotary positions.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._embedding = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        self._device = torch.device("cpu")

    def __call__(self, position_BN: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotations at these positions, in this dtype."""
        device = position_BN.device
        if self._device != device:
            self._embedding, self._device = self._embedding.to(device), device
        like = torch.empty(0, dtype=dtype, device=device)
        return Rotation(*self._embedding(like, position_BN))
