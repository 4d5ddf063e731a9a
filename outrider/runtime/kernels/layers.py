"""Lets a loaded ``transformers`` model compute with the kernels, all its other code unmodified.

Linear layers change their class, not their parameters; attention is one more implementation in
``transformers``' registry of them. torch's own kernels run forward passes over more than ``NARROW``
tokens, such as prefills, unless bits must not depend on the number of tokens.

Legend: B rows, H heads, N query tokens, S slots, C width of a head.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from outrider.core.errors import KernelError, OutriderWarning
from outrider.runtime.hf.int8_linear import Int8Linear
from outrider.runtime.kernels.build import load_kernels
from outrider.runtime.kernels.few_bits_linear import use_few_bits_kernels
from outrider.runtime.kernels.grouped import GroupedLinear
from outrider.runtime.kernels.operators import FUNCTIONS
from outrider.runtime.kernels.packing import pack, pack_groups, pack_int8, pack_integer_dots
from outrider.runtime.kernels.pages import Pages

NARROW = 32
"""Most tokens of a forward pass, over all rows, for which our kernels are the faster ones."""

FEW_QUERIES = 16
"""Most query tokens of a row whose attention is computed one token at a time (``attend.h``); fewer
where a matrix unit multiplies bfloat16 (``attend_wide.h``)."""

_ANY = 2**62
_DTYPES = (torch.float32, torch.bfloat16)  # what the kernels read; torch computes the others
_SPECIAL = ("softcap", "s_aux", "position_bias")  # what the kernel does not support
_NAMES = {NARROW: "outrider", _ANY: "outrider_exact"}


class NarrowLinear(nn.Linear):
    """A linear layer for few tokens. Its weight may be bfloat16 though its inputs are float32.

    Attributes:
        weight: (N, K); or packed in panels, with three dimensions (``packed.h``) and then float32,
            bfloat16 or int8; or with four (``grouped.h``) or five (``integer_dots.h``) and then
            bytes.
        widest: most tokens the kernel takes; it takes any number where the weight is packed.
    """

    widest: int = NARROW

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.outrider.linear(
            x, self.weight, self.bias, self.out_features, self.widest
        )
        return y


def use_kernels(module: nn.Module, *, exact: bool = False, compact: bool = False) -> None:
    """Gives a module the kernels for its linear layers and, where it has ``sdpa``, for attention.

    Args:
        module: the model, on a CPU; changed in place. Layers quantised to int8 are packed.
        exact: use them for any number of tokens, so that a token's bits do not depend on it.
        compact: pack the weights as the kernel reads them, which is fastest for any number of
            tokens, and store them in bfloat16 where that loses nothing, which halves the bytes to
            read. No other code can read them then.

    Raises:
        KernelError: they cannot be compiled here.
    """
    load_kernels(few_bits=any(map(_has_few_bits, module.modules())))
    _register_fakes()
    widest = _ANY if exact else NARROW
    pages = Pages()
    for name, layer in module.named_modules():
        if isinstance(layer, Int8Linear | GroupedLinear):
            _take_over(layer, pages)
        if isinstance(layer, NarrowLinear):
            layer.widest = widest
        if type(layer) in (nn.Linear, NarrowLinear) and layer.weight.dtype in _DTYPES:
            layer.__class__ = NarrowLinear
            assert isinstance(layer, NarrowLinear)
            layer.widest = widest
            if compact and layer.weight.ndim == 2:
                # T5 converts what enters this layer to the dtype of its weight
                keep_dtype = name.split(".")[-1] == "wo"
                packed = pack(layer.weight.detach(), keep_dtype)
                layer.weight = pages.parameter(packed)
    config: Any = getattr(module, "config", None)
    if config is None or module.dtype not in _DTYPES:
        return
    if config._attn_implementation in ("sdpa", *_NAMES.values()):
        module.set_attn_implementation(_NAMES[widest])  # type: ignore[operator]


def use_grouped_kernels(module: nn.Module, name: str) -> None:
    """Gives the layers of a module whose weights have a scale per group (``grouped.py``) the
    kernels, which compute the same as their plain code, faster. Other layers stay as they are.

    Where the kernels cannot be compiled, the plain code stays, with a warning.

    Args:
        module: the model; changed in place.
        name: how messages call it.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, GroupedLinear)]
    if not layers:
        return
    try:
        if layers[0].weight.is_cuda:
            use_few_bits_kernels(module)
            return
        load_kernels(few_bits=True)
    except KernelError as error:
        warnings.warn(
            f"{name} dequantises its weights in every forward pass, which is slow: {error}",
            OutriderWarning,
            stacklevel=3,
        )
        return
    _register_fakes()
    pages = Pages()
    for layer in layers:
        _take_over(layer, pages)


@cache
def _register_fakes() -> None:
    for operator, fake in _FAKES.items():
        torch.library.register_fake(f"outrider::{operator}", fake)


def is_exact(module: nn.Module) -> bool:
    """Whether linear layers of a module use the kernels for forward passes of any width."""
    return any(isinstance(each, NarrowLinear) and each.widest == _ANY for each in module.modules())


def ignores_threads(module: nn.Module) -> bool:
    """Whether the kernels compute all matrix products of a module, so that their bits do not depend
    on the number of threads. The libraries' may."""
    return all(map(_has_own_products, module.modules()))


def _has_own_products(part: nn.Module) -> bool:
    if isinstance(part, NarrowLinear):
        return part.weight.ndim > 2 or part.widest == _ANY
    matrices = [each for each in part.parameters(recurse=False) if each.ndim > 1]
    return not matrices or isinstance(part, nn.Embedding)


def rounds_inputs(module: nn.Module) -> bool:
    """Whether linear layers of a module round their inputs to eight bits (``integer_dots.h``)."""
    return any(
        isinstance(each, NarrowLinear) and each.weight.ndim == 5 for each in module.modules()
    )


def _has_few_bits(layer: nn.Module) -> bool:
    """Whether a layer has weights of 8 or 4 bits, packed or not."""
    is_packed = isinstance(layer, NarrowLinear) and layer.weight.dtype == torch.int8
    return is_packed or isinstance(layer, Int8Linear | GroupedLinear)


def _take_over(layer: Int8Linear | GroupedLinear, pages: Pages) -> None:
    """Turns a quantised layer into a ``NarrowLinear`` with the same weights, which rounds no inputs
    unless they are to be rounded to eight bits."""
    if isinstance(layer, Int8Linear):
        packed = pack_int8(layer.weight, layer.scale_N)
        del layer.weight, layer.scale_N
    else:
        pack_weight = pack_integer_dots if layer.rounds_inputs else pack_groups
        packed = pack_weight(layer.weight, layer.scale_NG, layer.offset_NG, layer.bits)
        del layer.weight, layer.scale_NG, layer.offset_NG
    layer.__class__ = NarrowLinear  # type: ignore[assignment]
    layer.weight = pages.parameter(packed)


def is_plain_attention(mask: Tensor | None, kwargs: Mapping[str, Any]) -> bool:
    """Whether attention with this mask and these other arguments is what our kernels compute."""
    special = any(kwargs.get(name) is not None for name in _SPECIAL)
    return not special and mask is not None and mask.shape[1] == 1


def _attention(widest: int) -> Any:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if not is_plain_attention(attention_mask, kwargs):
            result: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, **kwargs
            )
            return result
        assert attention_mask is not None
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        arguments = query, key, value, attention_mask, scale, widest
        return torch.ops.outrider.attend(*arguments), None

    return attend


for _widest, _name in _NAMES.items():
    AttentionInterface.register(_name, _attention(_ANY if _widest == _ANY else FEW_QUERIES))
    AttentionMaskInterface.register(_name, eager_mask)  # else it gets no mask


def _fake_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, widest: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def _fake_linears(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], outputs: list[int], widest: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(outputs)))


def _fake_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, widest: int
) -> Tensor:
    B, H, N, _ = q.shape
    return q.new_empty((B, N, H, v.shape[3]))


def _fake_function(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_mean(x: Tensor, keepdim: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1) if keepdim else x.shape[:-1])


def _fake_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _fake_truncated(p: Tensor, *parameters: Tensor) -> Tensor:
    return torch.empty_like(p)


_FAKES: dict[str, Callable[..., Tensor]] = {
    "linear": _fake_linear,
    "linears": _fake_linears,
    "attend": _fake_attend,
    "mean": _fake_mean,
    "layer_norm": _fake_layer_norm,
    "truncated": _fake_truncated,
    **dict.fromkeys(FUNCTIONS, _fake_function),
}
"""What each kernel returns, in shape and dtype, for tracing."""
