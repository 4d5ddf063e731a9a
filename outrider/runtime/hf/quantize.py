"""Weights of eight or four bits: fewer bytes to read for every token.

A forward pass over a few tokens reads every weight once, so where memory bandwidth is the limit
int8 takes a quarter of the time of float32. Weights are quantised, and inputs of
layers only if the kind says so:

    int8      one symmetric scale per output channel, through torchao
    int8:G    groups of G inputs, 32 or 128, each with a scale
    int4      groups of 32 inputs, each with a scale and a zero point (``kernels/grouped.py``); the
              head, whose error enters the distribution directly, has int8 weights in such groups
    int4:G    the same with groups of G inputs, 32 or 128
    keep      the blocks of a GGUF file as they are (``gguf_blocks.py``)
    KIND+a8   one of these in groups, whose layers round their inputs to eight bits, too

With ``+a8`` a layer multiplies integers, of which processors compute two to four times as many as
floats: forward passes over several tokens, prompts first, become faster. Each group of a token's
inputs has a scale of its own, so no token depends on another; layers that do not divide into groups
of a multiple of 32 do not round their inputs.

Layers that do not divide into groups of 128 get groups of 32, and those that do not divide into
these, int8 weights with a scale per output.

All but ``int8``, and ``int4`` on CUDA, compute with our kernels (``runtime/kernels``), whether a
model is compiled or not. Without a C++ compiler, or on CUDA without Triton, they run as plain torch
code, which dequantises weights in every forward pass and is slow; a warning says so. For int8 our
kernels take over the layers of ``int8_linear.py`` where a model on the CPU uses the kernels. On
CUDA torchao's tensors, of ``int8`` and ``int4``, also multiply, and no layer rounds its inputs.

Token embeddings are not quantised, since a forward pass reads few of their rows; a head that shares
them gets weights of its own. Layers whose weights the model's own code reads, such as the heads of
Mamba and xLSTM, keep theirs (``support.py``). A quantised model has its own distribution. As a
draft model, that is the `q` of its drafts, and verification stays exact; as a target, it is another
target. Heads are quantised where they are bound to their target (``drafters/heads/head_model.py``).
"""

import importlib
from collections.abc import Set
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.core.errors import InvalidParameterError, OutriderError, UnsupportedModelError
from outrider.core.values import check_choice
from outrider.runtime.hf.int8_linear import Int8Linear
from outrider.runtime.hf.support import reads_weight
from outrider.runtime.kernels import use_grouped_kernels
from outrider.runtime.kernels.few_bits_linear import FewBitsLinear
from outrider.runtime.kernels.grouped import CHUNK, STEP, GroupedLinear, rounded

KEEP = "keep"
ROUNDS_INPUTS = "+a8"
_GROUPED = ("int4", "int8:32", "int8:128", "int4:32", "int4:128", KEEP)
KINDS = ("int8", *_GROUPED, *(kind + ROUNDS_INPUTS for kind in _GROUPED))

_GROUP = 32
_BY_TORCHAO = {"cpu": ("int8",), "cuda": ("int8", "int4")}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MissingTorchaoError(OutriderError):
    """torchao is not installed."""


def quantize(module: PreTrainedModel, kind: str, name: str = "model") -> PreTrainedModel:
    """Quantises the weights of a model's linear layers, in place, and returns the model.

    Args:
        module: a decoder or an encoder-decoder in float32, bfloat16 or float16 on the CPU or CUDA;
            int4 on CUDA needs bfloat16.
        kind: one of ``KINDS``, except ``keep`` and ``keep+a8``.
        name: how messages call it.

    Raises:
        InvalidParameterError: an unknown kind, or a dtype or device that it does not work with.
        MissingTorchaoError: the kind needs torchao, which is not installed.
        UnsupportedModelError: most weights are not in linear layers, or are quantised already.
    """
    check_kind(kind)
    if keeps_blocks(kind):
        raise InvalidParameterError(f"{kind!r} is for GGUF files, and {name} is in memory")
    _check_place(module, kind, name)
    layers = _layers(module, name)
    _round(module, layers, {module.get_output_embeddings()}, kind, name)
    return module


def quantize_head(network: nn.Module, kind: str, num_outputs: int, name: str = "head") -> None:
    """Quantises the weights of a drafting head's linear layers, in place.

    Args:
        network: on the CPU or CUDA, in a dtype as of :func:`quantize`.
        kind: as of :func:`quantize`.
        num_outputs: tokens that the head drafts: layers with as many outputs are its output layers,
            which have int8 weights where the kind is int4.
        name: how messages call it.

    Raises:
        InvalidParameterError: as :func:`quantize`.
        MissingTorchaoError: as :func:`quantize`.
        UnsupportedModelError: torchao cannot quantise it.
    """
    check_kind(kind)
    if keeps_blocks(kind):
        raise InvalidParameterError(
            f"{kind!r} keeps the blocks of a GGUF file, and {name} is none: take another kind, "
            f"such as int8:32"
        )
    layers = {
        path: layer
        for path, layer in network.named_modules()
        if type(layer) is nn.Linear and layer.in_features % (2 * STEP) == 0
    }
    outputs = {layer for layer in layers.values() if layer.out_features == num_outputs}
    _check_place(next(network.parameters()), kind, name)
    _round(network, layers, outputs, kind, name)


def _round(
    module: nn.Module,
    layers: dict[str, nn.Linear],
    outputs: Set[nn.Module | None],
    kind: str,
    name: str,
) -> None:
    """Quantises layers of a module, some of which may be its output layers."""
    device = next(module.parameters()).device.type
    by_torchao = kind in _BY_TORCHAO[device]
    try:
        if by_torchao:
            _use_torchao(module, layers, outputs, kind, device == "cpu")
        else:
            for path, layer in layers.items():
                module.set_submodule(path, _grouped(layer, kind, layer in outputs))
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        who = "torchao" if by_torchao else "Outrider"
        raise UnsupportedModelError(
            f"{who} cannot quantize {name} ({type(module).__name__}) to {kind}: {reason[0]}; "
            f"load it without quantization"
        ) from error
    use_grouped_kernels(module, name)


def keeps_blocks(kind: str | None) -> bool:
    """Whether a kind keeps the blocks of a GGUF file."""
    return kind is not None and kind.removesuffix(ROUNDS_INPUTS) == KEEP


def check_kind(kind: str, parameter: str = "quantized") -> None:
    """Raises InvalidParameterError, which names the parameter, for an unknown kind."""
    check_choice(parameter, kind, KINDS)


def _grouped(layer: nn.Linear, kind: str, is_head: bool) -> GroupedLinear:
    """The layer in groups, as the kind asks for and its size allows."""
    base, _, size = kind.removesuffix(ROUNDS_INPUTS).partition(":")
    K = layer.in_features
    fitting = [group for group in (int(size or _GROUP), _GROUP) if K % group == 0]
    small = base == "int4" and bool(fitting) and not is_head
    group = fitting[0] if fitting else K
    weight = rounded(layer.weight, 4 if small else 8, group, offsets=small)
    return GroupedLinear(weight, layer.bias, kind.endswith(ROUNDS_INPUTS) and group % CHUNK == 0)


def _use_torchao(
    module: nn.Module,
    layers: dict[str, nn.Linear],
    outputs: Set[nn.Module | None],
    kind: str,
    on_cpu: bool,
) -> None:
    """Rounds the layers by torchao; on the CPU they multiply by torch's kernel for int8."""
    torchao = _torchao()
    if on_cpu:
        for path, layer in layers.items():
            module.set_submodule(path, Int8Linear(layer, torchao))
        return
    kinds = {
        path: "int4" if kind == "int4" and _fits_int4(layer) and layer not in outputs else "int8"
        for path, layer in layers.items()
    }
    for each in set(kinds.values()):
        torchao.quantize_(
            module,
            _config(each, torchao),
            filter_fn=lambda _, path, each=each: kinds.get(path) == each,
        )


def _layers(module: PreTrainedModel, name: str) -> dict[str, nn.Linear]:
    """The linear layers that can be quantised, by their paths. They hold most of the weights, else
    the model is refused."""
    kind = type(module).__name__
    if (
        any(map(_is_quantized, module.modules()))
        or getattr(module.config, "quantization_config", None) is not None
    ):
        raise UnsupportedModelError(
            f"{name} ({kind}) is quantized already: load it without quantization"
        )
    layers = {
        path: layer
        for path, layer in module.named_modules()
        if type(layer) is nn.Linear
        and layer.in_features % (2 * STEP) == 0
        and not reads_weight(module.config, path)
    }
    apart = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    head = module.get_output_embeddings()
    if head is not None:
        apart.add(id(head.weight))
    matrices = {id(p): p.numel() for p in module.parameters() if p.ndim > 1 and id(p) not in apart}
    found = sum(matrices.get(id(layer.weight), 0) for layer in layers.values())
    if 2 * found < sum(matrices.values()):
        raise UnsupportedModelError(
            f"{name} ({kind}) cannot be quantized: only linear layers are (of a width "
            f"divisible by 16), and they hold {found:,} of the {sum(matrices.values()):,} weights "
            f"of its layers; load it without quantization, or in bfloat16"
        )
    return layers


def _is_quantized(layer: nn.Module) -> bool:
    packed = isinstance(layer, nn.Linear) and layer.weight.dtype == torch.int8
    return packed or isinstance(layer, Int8Linear | GroupedLinear | FewBitsLinear)


def _fits_int4(layer: nn.Linear) -> bool:
    return layer.in_features % _GROUP == 0 and layer.out_features % 16 == 0


def _check_place(module: PreTrainedModel | nn.Parameter, kind: str, name: str) -> None:
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
    if device == "cuda" and kind.endswith(ROUNDS_INPUTS):
        raise InvalidParameterError(
            f"{name} is on cuda, where {kind} does not work: use {kind.removesuffix(ROUNDS_INPUTS)}"
        )
    if kind == "int4" and device == "cuda" and dtype != torch.bfloat16:
        raise InvalidParameterError(
            f"{name}: int4 on CUDA needs dtype='bfloat16', not {dtype}; int4:32 does not"
        )


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
