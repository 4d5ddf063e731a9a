"""Weights of eight or four bits, through torchao: fewer bytes to read for every token.

A forward pass over a few tokens reads every weight once, so where memory bandwidth is the limit
int8 takes a quarter of the time of float32. Only weights are quantised:

    int8    one symmetric scale per output channel
    int4    groups of 32 inputs, each with a scale and a zero point; the head, whose error enters
            the distribution directly, is int8, as are layers that do not divide into such groups

torchao rounds the weights. On CUDA its tensors also multiply. On the CPU they would convert the
weights back to floats in every forward pass, which is slower than the unquantised model, so there
layers are replaced by ones that call torch's packed kernels. Only the kernels for bfloat16 are
vectorised, so inputs and outputs of such a layer are rounded to bfloat16, an eighth of the error of
int8 weights. Our own kernels (``runtime/kernels``), where a model uses them, take over int8 layers
and round nothing.

Token embeddings are not quantised, since a forward pass reads few of their rows; a head that shares
them gets weights of its own. A quantised model has its own distribution. As a draft model, that is
the `q` of its drafts, and verification stays exact; as a target, it is another target.

Legend: M query tokens of all rows, K inputs, N outputs, G groups.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.errors import InvalidParameterError, OutriderError, UnsupportedModelError
from outrider.core.values import check_choice

KINDS = ("int8", "int4")

_GROUP = 32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MissingTorchaoError(OutriderError):
    """torchao is not installed."""


def quantize(module: PreTrainedModel, kind: str, name: str = "model") -> PreTrainedModel:
    """Quantises the weights of a model's linear layers, in place, and returns the model.

    Args:
        module: a decoder or an encoder-decoder in float32, bfloat16 or float16 on the CPU or CUDA;
            int4 on CUDA needs bfloat16.
        kind: ``int8`` or ``int4``.
        name: how messages call it.

    Raises:
        InvalidParameterError: an unknown kind, or a dtype or device that it does not work with.
        MissingTorchaoError: torchao is not installed.
        UnsupportedModelError: most weights are not in linear layers, or are quantised already.
    """
    check_kind(kind)
    _check_place(module, kind, name)
    torchao = _torchao()
    layers = _layers(module, name)
    head = module.get_output_embeddings()
    kinds = {
        path: "int4" if kind == "int4" and _fits_int4(layer) and layer is not head else "int8"
        for path, layer in layers.items()
    }
    try:
        if module.device.type == "cpu":
            for path, layer in layers.items():
                packed = Int4Linear if kinds[path] == "int4" else Int8Linear
                module.set_submodule(path, packed(layer, torchao))
        else:
            for each in set(kinds.values()):
                torchao.quantize_(
                    module,
                    _config(each, torchao),
                    filter_fn=lambda _, path, each=each: kinds.get(path) == each,
                )
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModelError(
            f"torchao cannot quantize {name} ({type(module).__name__}) to {kind}: {reason[0]}; "
            f"load it without quantization"
        ) from error
    return module


def check_kind(kind: str, parameter: str = "quantized") -> None:
    """Raises InvalidParameterError, which names the parameter, for an unknown kind."""
    check_choice(parameter, kind, KINDS)


class PackedLinear(nn.Module):
    """A linear layer with quantised weights on the CPU.

    Attributes:
        weight: the packed weights; int8 in both kinds, so that T5 does not convert its
            activations to their dtype.
    """

    weight: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, (…, K) to (…, N) in the dtype of x."""
        x_MK = x.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        y_MN = self.multiply(x_MK).to(x.dtype)
        if self.bias is not None:
            y_MN = y_MN + self.bias
        return y_MN.view(*x.shape[:-1], self.out_features)

    def multiply(self, x_MK: Tensor) -> Tensor:
        """x Wᵀ, (M, N), in bfloat16."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Int8Linear(PackedLinear):
    """int8 weights with a scale per output; the kernel needs a K that is a multiple of 16."""

    scale_N: Tensor

    def __init__(self, linear: nn.Linear, torchao: Any) -> None:
        super().__init__(linear)
        rounded = torchao.Int8Tensor.from_hp(linear.weight.detach().float(), torchao.PerRow())
        self.register_buffer("weight", rounded.qdata)
        self.register_buffer("scale_N", rounded.scale.flatten().to(torch.bfloat16))

    def multiply(self, x_MK: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x_MK, self.weight, self.scale_N)


class Int4Linear(PackedLinear):
    """int4 weights with a scale s and a zero point z per group: w = s (v - z) for v from 0 to 15.

    The kernel computes w = s (v - 8) + s (8 - z), and packs 16 outputs together.
    """

    scales_and_zeros_GN2: Tensor

    def __init__(self, linear: nn.Linear, torchao: Any) -> None:
        super().__init__(linear)
        weight_NK = linear.weight.detach().float()
        N, K = weight_NK.shape
        block, bounds = (1, _GROUP), (0, 15)
        asymmetric = torchao.MappingType.ASYMMETRIC
        scale, zero = torchao.choose_qparams_affine(
            weight_NK, asymmetric, block, torch.int32, *bounds
        )
        values_NK = torchao.quantize_affine(weight_NK, block, scale, zero, torch.int32, *bounds)
        both_NG2 = torch.stack([scale, (8 - zero) * scale], -1).view(N, K // _GROUP, 2)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_NK, 1)
        self.register_buffer("weight", packed.view(torch.int8))
        self.register_buffer(
            "scales_and_zeros_GN2", both_NG2.transpose(0, 1).to(torch.bfloat16).contiguous()
        )

    def multiply(self, x_MK: Tensor) -> Tensor:
        y_MN: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_MK, self.weight.view(torch.uint8), _GROUP, self.scales_and_zeros_GN2
        )
        return y_MN


def _layers(module: PreTrainedModel, name: str) -> dict[str, nn.Linear]:
    """The linear layers that can be quantised, by their paths. They hold most of the weights, else
    the model is refused."""
    kind = type(module).__name__
    done = any(isinstance(each, PackedLinear) for each in module.modules())
    if done or getattr(module.config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{name} ({kind}) is quantized already: load it without quantization"
        )
    layers = {
        path: layer
        for path, layer in module.named_modules()
        if type(layer) is nn.Linear and layer.in_features % 16 == 0
    }
    apart = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    head = module.get_output_embeddings()
    if head is not None:
        apart.add(id(head.weight))
    matrices = {id(p): p.numel() for p in module.parameters() if p.ndim > 1 and id(p) not in apart}
    found = sum(matrices.get(id(layer.weight), 0) for layer in layers.values())
    if 2 * found < sum(matrices.values()):
        raise UnsupportedModelError(
            f"{name} ({kind}) cannot be quantized: torchao quantizes linear layers (of a width "
            f"divisible by 16), and they hold {found:,} of the {sum(matrices.values()):,} weights "
            f"of its layers; load it without quantization, or in bfloat16"
        )
    return layers


def _fits_int4(layer: nn.Linear) -> bool:
    return layer.in_features % _GROUP == 0 and layer.out_features % 16 == 0


def _check_place(module: PreTrainedModel, kind: str, name: str) -> None:
    dtype, device = module.dtype, module.device.type
    if dtype not in _DTYPES:
        raise InvalidParameterError(
            f"{name} has {dtype} weights, which {kind} does not work with: use dtype='float32', "
            f"'bfloat16' or 'float16'"
        )
    if device not in ("cpu", "cuda"):
        raise InvalidParameterError(
            f"{name} is on {device}, where {kind} does not work: use device='cpu' or 'cuda'"
        )
    if kind == "int4" and device == "cuda" and dtype != torch.bfloat16:
        raise InvalidParameterError(f"{name}: int4 on CUDA needs dtype='bfloat16', not {dtype}")


def _config(kind: str, torchao: Any) -> Any:
    """torchao's configuration, which leaves the compiler's settings alone."""
    if kind == "int8":
        return torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    return torchao.Int4WeightOnlyConfig(
        group_size=_GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise MissingTorchaoError(
            'quantization needs torchao, which is not installed: pip install "outrider[quantize]"'
        ) from error
