"""Gated MLPs on a GPU: two matrix products with one kernel between them.

    y = W_down (act(W_gate x) · W_up x)

Models of ``transformers`` compute it by five kernels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runtime.kernels.joined_linears import can_join, example_inputs, join, joined_linear
from outrider.runtime.kernels.replaced_methods import (
    agree,
    replace_forward,
    runs_own_code,
)

_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def use_fused_mlps(module: nn.Module) -> int:
    """Lets the MLPs of a module run by fewer kernels where they compute the formula; returns how
    many do.

    Args:
        module: a model; the methods of its MLPs are replaced, and their weights moved together.
    """
    found = 0
    for each in module.modules():
        activation = _activation(each)
        if activation is not None and _computes_the_formula(each, activation):
            join((each.gate_proj, each.up_proj))
            replace_forward(each, forward, activation=activation)
            found += 1
    return found


def _activation(module: Any) -> str | None:
    """The name of an MLP's activation, which its values tell; None for other modules."""
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    gate, up, down, act = (getattr(module, name, None) for name in names)
    if not can_join((gate, up)) or not isinstance(down, nn.Module) or not callable(act):
        return None
    x_N = torch.linspace(-6, 6, 241, dtype=torch.float64)
    same = (name for name, formula in _ACTIVATIONS.items() if _is_same(act(x_N), formula(x_N)))
    return next(same, None)


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-9)


@torch.no_grad()
def _computes_the_formula(module: Any, activation: str) -> bool:
    x_NH = example_inputs(module.gate_proj)
    return agree(_gated(module, x_NH, activation), type(module).forward(module, x_NH))


def forward(module: Any, x: Tensor, *, activation: str) -> Tensor:
    """The MLP's method."""
    if runs_own_code(module):
        found: Tensor = type(module).forward(module, x)
        return found
    return _gated(module, x, activation)


def _gated(module: Any, x: Tensor, activation: str) -> Tensor:
    found: Tensor = module.down_proj(inner(module, x, activation))
    return found


def inner(module: Any, x: Tensor, activation: str) -> Tensor:
    """What the last matrix of the MLP is multiplied by."""
    from outrider.runtime.kernels.gpu_kernels import gated

    return gated(joined_linear(x, (module.gate_proj, module.up_proj)), activation)
