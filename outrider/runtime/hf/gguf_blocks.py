"""Keeps the blocks of a GGUF file as the weights of linear layers, without rounding them again.

A block of Q8_0, Q4_0 or Q4_1 is a group of 32 inputs of ``kernels/grouped.py``: a float16 scale,
for Q4_1 a float16 offset, and integers. A layer that keeps its blocks has the weights that the
file's own reader dequantises, bit for bit, whereas the converted folder (``gguf.py``) holds them
rounded to bfloat16.

The converted model says what the blocks belong to. ``transformers`` maps tensor names; and since
llama.cpp orders the outputs of query and key projections by rotated pairs, an order of the outputs
is tried until the blocks agree with the converted weight. A layer whose blocks agree in no order,
or whose tensor has another format, keeps its converted weights. So do embeddings, and layers whose
weights the model's own code reads (``support.py``); a head that shares the embeddings takes their
blocks.

Legend: K inputs, N outputs, G groups of inputs.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.errors import InvalidParameterError, OutriderWarning, UnsupportedModelError
from outrider.runtime.hf.gguf import missing_packages, stored_dtype
from outrider.runtime.hf.support import reads_weight
from outrider.runtime.kernels import use_grouped_kernels
from outrider.runtime.kernels.grouped import GroupedLinear, GroupedWeight

KINDS = ("Q8_0", "Q4_0", "Q4_1")
"""The formats of blocks that are kept."""

_GROUP = 32
_HALF = 2  # bytes of a float16


def keep_blocks(
    module: PreTrainedModel, file: Path, name: str = "model", rounds_inputs: bool = False
) -> PreTrainedModel:
    """Replaces the linear layers of a converted model by layers of the file's blocks, in place.

    Args:
        module: the model of the converted folder, on the CPU or CUDA.
        file: the GGUF file.
        name: how messages call the model.
        rounds_inputs: whether the layers round their inputs to eight bits (``grouped.py``); on the
            CPU only.

    Returns:
        The module. A warning says how many of its linear layers are not kept as blocks.

    Raises:
        InvalidParameterError: a model that is on another device, or on CUDA and to round inputs.
        ModelLoadError: the package that reads GGUF is not installed.
        UnsupportedModelError: none of its layers can be kept, or the package does not know its
            architecture.
    """
    if module.device.type not in ("cpu", "cuda"):
        raise InvalidParameterError(
            f"{name} is on {module.device}, where blocks of GGUF files cannot be kept: use "
            f"device='cpu' or 'cuda', or load it without quantization"
        )
    if module.device.type == "cuda" and rounds_inputs:
        raise InvalidParameterError(
            f"{name} is on {module.device}, where inputs are not rounded to eight bits: keep the "
            f"file's blocks without rounding inputs (keep), or use device='cpu'"
        )
    try:
        from gguf import GGUFReader  # an optional dependency
    except ImportError as error:
        raise missing_packages() from error
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    layers = [
        (path, layer)
        for path, layer in module.named_modules()
        if type(layer) is nn.Linear and not reads_weight(module.config, path)
    ]
    names, stored = _names(module, name), stored_dtype(file)
    apart: dict[str, str] = {}  # layers with other weights, each with the format of its tensor
    for path, layer in layers:
        tensor = _tensor_of(path, layer, module, names, tensors)
        weight = None if tensor is None else _agreeing(tensor, layer, module, stored)
        if weight is None:
            apart[path] = "no tensor" if tensor is None else tensor.tensor_type.name
        else:
            grouped = GroupedLinear(weight, layer.bias, rounds_inputs)
            module.set_submodule(path, grouped.to(module.device))
    if len(apart) == len(layers):
        raise UnsupportedModelError(
            f"{name} has no linear layer in {', '.join(KINDS)} whose blocks could be kept; its "
            f"layers are in {', '.join(sorted(set(apart.values())))}: load it without quantization"
        )
    if apart:
        path, kind = next(iter(apart.items()))
        warnings.warn(
            f"{name}: {len(apart)} of {len(layers)} linear layers stay in "
            f"{str(module.dtype).removeprefix('torch.')}, such as {path} ({kind} in the file); "
            f"blocks are kept of {', '.join(KINDS)}, where they agree with the converted weights",
            OutriderWarning,
            stacklevel=2,
        )
    use_grouped_kernels(module, name)
    return module


def read_blocks(kind: str, bytes_NB: Tensor) -> GroupedWeight:
    """The weight whose rows are blocks of a GGUF tensor.

    Args:
        kind: one of ``KINDS``.
        bytes_NB: the blocks of each output, uint8.
    """
    bits = 8 if kind == "Q8_0" else 4
    halves = _HALF * (1 + (kind == "Q4_1"))
    size = halves + _GROUP * bits // 8
    N = len(bytes_NB)
    blocks = bytes_NB.view(N, -1, size)
    numbers = blocks[..., :halves].contiguous().view(torch.float16)
    integers = blocks[..., halves:]
    if bits == 8:
        values = integers.contiguous().view(torch.int8)
    else:  # the first half of the inputs is in the low bits, the second in the high bits
        values = torch.cat((integers & 15, integers >> 4), -1).to(torch.int8)
    if kind == "Q4_0":
        values = values - 8
    offset = numbers[..., 1].contiguous() if kind == "Q4_1" else None
    return GroupedWeight(values.reshape(N, -1), numbers[..., 0].contiguous(), offset, bits)


def _names(module: PreTrainedModel, name: str) -> dict[str, str]:
    """The names of GGUF tensors by the names of the model's parameters."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    config: dict[str, Any] = module.config.to_dict()
    processor = TENSOR_PROCESSORS.get(config["model_type"], TensorProcessor)(config=config)
    try:
        found = get_gguf_hf_weights_map(module, processor)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{name}: {str(error).splitlines()[0]}, so its blocks cannot be kept: load it without "
            f"quantization"
        ) from error
    return {ours: theirs for theirs, ours in found.items()}


def _tensor_of(
    path: str,
    layer: nn.Linear,
    module: PreTrainedModel,
    names: dict[str, str],
    tensors: dict[str, Any],
) -> Any:
    """The file's tensor of a layer; None if there is none."""
    tensor = tensors.get(names.get(f"{path}.weight", ""))
    embeddings: Any = module.get_input_embeddings()
    if tensor is None and layer.weight is embeddings.weight:
        shared = (key for key, value in module.named_modules() if value is embeddings)
        return tensors.get(names.get(f"{next(shared)}.weight", ""))
    return tensor


def _agreeing(
    tensor: Any, layer: nn.Linear, module: PreTrainedModel, stored: torch.dtype
) -> GroupedWeight | None:
    """The tensor's blocks with its outputs in the order of the layer; None if it has another
    format, or if its weights are not those of the layer."""
    if tensor.tensor_type.name not in KINDS or len(tensor.data) != layer.out_features:
        return None
    blocks = torch.from_numpy(np.array(tensor.data, dtype=np.uint8))
    weight = read_blocks(tensor.tensor_type.name, blocks)
    wanted_NK = layer.weight.cpu()
    rounded_NK = weight.dequantized().to(stored).to(wanted_NK.dtype)
    if rounded_NK.shape != wanted_NK.shape:
        return None
    for order_N in _orders(module, layer.out_features):
        if torch.equal(rounded_NK[order_N], wanted_NK):
            return weight.rows(order_N)
    return None


def _orders(module: PreTrainedModel, outputs: int) -> Iterator[Tensor]:
    """Orders that a layer's outputs may have in the file: the model's own, and that of heads whose
    rotated pairs are neighbours."""
    order_N = torch.arange(outputs)
    yield order_N
    config = module.config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if heads and outputs % (2 * heads) == 0:
            yield order_N.view(heads, -1, 2).transpose(1, 2).flatten()
