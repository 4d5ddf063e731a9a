"""Sampling parameters, and the warp from logits to distributions. Depends on torch only."""

from outrider.sampling.params import Processor, Sampling
from outrider.sampling.warp import Warp

__all__ = ["Processor", "Sampling", "Warp"]
