"""Kernels for forward passes over few tokens on a CPU."""

from outrider.runtime.kernels.build import kernels_are_loaded
from outrider.runtime.kernels.layers import (
    NARROW,
    NarrowLinear,
    ignores_threads,
    is_exact,
    rounds_inputs,
    use_grouped_kernels,
    use_kernels,
)

__all__ = [
    "NARROW",
    "NarrowLinear",
    "ignores_threads",
    "is_exact",
    "kernels_are_loaded",
    "rounds_inputs",
    "use_grouped_kernels",
    "use_kernels",
]
