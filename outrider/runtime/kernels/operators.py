"""The kernels as operators of torch: their signatures. ``operators.cpp`` registers what they do,
``exact_mode.cpp`` what stands in for operators of torch, and ``program.cpp`` what runs programs.

They are defined here since torch's stable interface for C++ has no tags before torch 2.12.
"""

from torch import Tag
from torch.library import Library, fallthrough_kernel

FUNCTIONS = ("exp", "tanh", "sin", "cos", "sigmoid", "silu", "gelu", "gelu_tanh")
"""Functions of single numbers."""

_SIGNATURES = (
    "linear(Tensor x, Tensor weight, Tensor? bias, int outputs, int widest) -> Tensor",
    "linears(Tensor x, Tensor[] weights, Tensor[] biases, int[] outputs, int widest) -> Tensor",
    *(f"{name}(Tensor x) -> Tensor" for name in FUNCTIONS),
    "mean(Tensor x, bool keepdim) -> Tensor",
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    "truncated(Tensor p, Tensor top_k, Tensor top_p, Tensor strict, Tensor min_p) -> Tensor",
    "move_slots(Tensor(a!)[] buffers, int[] lengths, Tensor index, int first) -> ()",
    "load_program(str path) -> int",
    "constant_names(int address) -> str[]",
    "use_constants(int address, str[] names, Tensor[] tensors) -> ()",
    "run_program(int address, Tensor[] inputs) -> Tensor[]",
)

_ATTEND = (
    "attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, "
    "int widest=9223372036854775807) -> Tensor"
)

_EXACT_MODE = "TESTING_ONLY_GenericMode"
"""The dispatch key of exact mode (``exact_mode.cpp``)."""

_libraries: list[Library] = []
"""An operator is defined as long as the library that it was defined by."""


def define_operators() -> None:
    """Defines the operators, once, and lets all others of torch ignore exact mode."""
    if _libraries:
        return
    ours, everything = Library("outrider", "FRAGMENT"), Library("_", "IMPL", _EXACT_MODE)
    for signature in _SIGNATURES:
        ours.define(signature)
    # without the tag, programs compute the mask in each layer
    ours.define(_ATTEND, tags=(Tag.flexible_layout,))
    everything.fallback(fallthrough_kernel)
    _libraries.extend((ours, everything))
