"""Kernels of our own for passes over few tokens on a CPU."""

from outrider.models.kernels.layers import NARROW, NarrowLinear, use_kernels

__all__ = ["NARROW", "NarrowLinear", "use_kernels"]
