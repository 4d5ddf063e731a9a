"""The weights of a model that runs: read as plain tensors, and exchanged in place.

Compiled programs and CUDA graphs hold the addresses of weights, and the kernels read packed copies
(``kernels/packed.h``). New weights are therefore packed as the old ones are, and then copied to the
same addresses.

Legend: K inputs and N outputs of a linear layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.core.errors import IncompatibleError, UnsupportedModelError
from outrider.runtime.kernels import NarrowLinear
from outrider.runtime.kernels.packing import pack

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StagedWeights:
    """New weights, laid out as a module stores them.

    Attributes:
        pairs: parameters of the module, each with a tensor of its shape and dtype.
    """

    pairs: tuple[tuple[nn.Parameter, Tensor], ...]

    @torch.no_grad()
    def write(self) -> None:
        """Copies the weights into the module. No forward pass of it may be running."""
        for parameter, weight in self.pairs:
            parameter.copy_(weight)


def plain_weights(module: nn.Module, name: str = "model") -> dict[str, Tensor]:
    """Copies of a module's weights under the names and in the shapes of its ``state_dict``, in
    float32 and on the CPU, whatever the kernels have made of them.

    Raises:
        UnsupportedModelError: weights of a few bits.
    """
    check_trainable(module, name)
    packed = _packed_layers(module)
    weights = {}
    for key, tensor in module.state_dict().items():
        plain = _unpacked(packed[key]) if key in packed else tensor.detach()
        weights[key] = plain.to("cpu", torch.float32, copy=True) if _is_float(plain) else plain
    return weights


def check_trainable(module: nn.Module, name: str) -> None:
    """Raises UnsupportedModelError for a module whose weights are rounded to a few bits."""
    for tensor in (*module.parameters(), *module.buffers()):
        if type(tensor) not in (nn.Parameter, Tensor) or tensor.dtype == torch.int8:
            raise UnsupportedModelError(
                f"{name} has quantized weights, which cannot be trained: load it without "
                f"quantization"
            )


@torch.no_grad()
def staged(module: nn.Module, weights: Mapping[str, Tensor], name: str = "model") -> StagedWeights:
    """Lays out weights as the module stores its own: rounded to the same dtypes, packed where its
    weights are packed, on its device.

    Args:
        module: the module that they are for; not changed.
        weights: as :func:`plain_weights` returns them; those of other names are ignored.
        name: how messages call the module.

    Raises:
        IncompatibleError: a weight is missing, or has another shape.
    """
    packed = _packed_layers(module)
    pairs = []
    for key, parameter in module.named_parameters():
        weight = weights.get(key)
        layer = packed.get(key)
        shape = parameter.shape if layer is None else (layer.out_features, layer.in_features)
        if weight is None or weight.shape != torch.Size(shape):
            found = "there is none" if weight is None else f"shape {tuple(weight.shape)}"
            raise IncompatibleError(
                f"new weights for {name}: {key} should have shape {tuple(shape)}, and {found}"
            )
        weight = weight.to(parameter.dtype)
        if layer is not None:
            weight = pack(weight, True)
        pairs.append((parameter, weight.to(parameter.device)))
    return StagedWeights(tuple(pairs))


def _packed_layers(module: nn.Module) -> dict[str, NarrowLinear]:
    """The layers whose weights are packed, by the name of the weight."""
    return {
        f"{path}.weight": layer
        for path, layer in module.named_modules()
        if isinstance(layer, NarrowLinear) and layer.weight.ndim == 3
    }


def _unpacked(layer: NarrowLinear) -> Tensor:
    """The weight of a packed layer, (N, K): its outputs for the rows of the identity matrix, which
    are sums of one weight and zeros and hence exact."""
    eye_KK = torch.eye(layer.in_features)
    y_KN: Tensor = torch.ops.outrider.linear(
        eye_KK, layer.weight, None, layer.out_features, layer.widest
    )
    return y_KN.T.contiguous()


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype in _FLOATS
