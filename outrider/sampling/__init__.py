"""Sampling parameters and the warp from logits to laws. Torch only."""

from outrider.sampling.params import Processor, Sampling
from outrider.sampling.warp import Warp

__all__ = ["Processor", "Sampling", "Warp"]
