"""Kernels for forward passes over few tokens on a CPU.

Names are imported when they are first used: compiling the kernels needs no ``transformers``.
"""

from typing import TYPE_CHECKING

from outrider.imports.lazy import lazy

if TYPE_CHECKING:
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

_LAYERS = "outrider.runtime.kernels.layers"
_HOME = dict.fromkeys(__all__, _LAYERS)
_HOME["kernels_are_loaded"] = "outrider.runtime.kernels.build"

__getattr__, __dir__ = lazy(__name__, _HOME)
