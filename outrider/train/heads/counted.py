"""The weights of a head whose training draws random places in its data.

What is drawn follows from the seed and the number of batches seen, which is saved with the weights:
a resumed run draws the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CountedNetwork(nn.Module):
    """The weights in training, and how many batches they have seen.

    Args:
        network: the weights.
    """

    num_seen: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
