"""Decoder layers on a GPU whose sums take no kernel of their own.

    y = x + attention(norm(x))
    z = y + MLP(norm(y))

The first sum is computed by the kernel of the norm that reads it, the second by the matrix product
before it, which adds to y in place. Only layers whose attention and MLP run by our kernels do so.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.runtime.kernels import fused_attention, fused_mlp
from outrider.runtime.kernels.fused_norms import added_to_weight, epsilon_of
from outrider.runtime.kernels.joined_linears import example_inputs
from outrider.runtime.kernels.replaced_methods import (
    agree,
    has_hooks,
    replace_forward,
    runs_own_code,
    variant_of,
)


def use_fused_residuals(module: nn.Module) -> int:
    """Lets the decoder layers of a module run without kernels for sums where they compute the
    formula; returns how many do.

    Args:
        module: a model whose norms, MLPs and attention layers run by our kernels; the methods of
            its layers are replaced.
    """
    found = 0
    for each in module.modules():
        added = _added(each)
        if added is not None and _computes_the_formula(each, added):
            replace_forward(each, _forward, added=added)
            found += 1
    return found


def _added(module: Any) -> float | None:
    """What is added to the weight of a decoder layer's second norm; None for other modules, and for
    layers whose parts are others than ours."""
    from outrider.runtime.kernels.gpu_kernels import ADDED, normed

    names = "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"
    attention, mlp, *norms = (getattr(module, name, None) for name in names)
    if variant_of(attention, fused_attention.forward) is None or None in norms:
        return None
    if mlp is None or variant_of(mlp, fused_mlp.forward) is None:
        return None
    if any(map(has_hooks, (mlp.down_proj, *norms))):
        return None
    return added_to_weight(norms[1], normed, ADDED)


def _forward(
    module: Any, hidden_states: Tensor, *arguments: Any, added: float, **given: Any
) -> Tensor:
    usual = not arguments and fused_attention.is_usual(module.self_attn, **given)
    if runs_own_code(module) or not usual:
        found: Tensor = type(module).forward(module, hidden_states, *arguments, **given)
        return found
    return _summed(module, hidden_states, added, given)


def _summed(module: Any, x_BNH: Tensor, added: float, given: Mapping[str, Any]) -> Tensor:
    from outrider.runtime.kernels.gpu_kernels import normed_sum

    norm, mlp = module.post_attention_layernorm, module.mlp
    epsilon = epsilon_of(norm) or 0.0
    attended_BNH, _ = module.self_attn(hidden_states=module.input_layernorm(x_BNH), **given)
    y_BNH, normed_BNH = normed_sum(x_BNH, attended_BNH, norm.weight, epsilon, added)
    inner_BNF = fused_mlp.inner(mlp, normed_BNH, **(variant_of(mlp, fused_mlp.forward) or {}))
    down = mlp.down_proj
    if type(down) is not nn.Linear or down.bias is not None:
        return y_BNH.add_(down(inner_BNF))
    y_BNH.view(-1, y_BNH.shape[-1]).addmm_(inner_BNF.flatten(0, -2), down.weight.t())
    return y_BNH


@torch.no_grad()
def _computes_the_formula(module: Any, added: float) -> bool:
    attention = module.self_attn
    x_BNH = example_inputs(attention.q_proj).view(2, 2, -1)
    given = {
        "position_embeddings": fused_attention.example_angles(attention, x_BNH),
        "attention_mask": x_BNH.new_zeros(2, 1, 2, 2),
        "past_key_values": None,
    }
    try:
        wanted = type(module).forward(module, x_BNH, **given)
        return agree(_summed(module, x_BNH, added, given), wanted)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False  # it is of another form
