"""Sampling parameters, and the warp from logits to distributions. Depends on torch only."""

from outrider.sampling.grammar import Grammar
from outrider.sampling.params import Processor, Sampling
from outrider.sampling.warp import Warp

__all__ = ["Grammar", "Processor", "Sampling", "Warp"]
