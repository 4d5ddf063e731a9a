"""Linear layers with weights of few bits on a GPU: those of ``grouped.py``, computed by a kernel
that reads them as they are.

Legend: K inputs, N outputs, G groups of inputs, P bytes of a group.
"""

from importlib.util import find_spec

import torch
from torch import Tensor, nn

from outrider.core.errors import KernelError
from outrider.runtime.kernels.grouped import GroupedLinear
from outrider.runtime.kernels.replaced_methods import agree, example


class FewBitsLinear(nn.Module):
    """A linear layer of a GPU with a scale, and maybe an offset, per group of inputs.

    Args:
        layer: the layer whose weights it has; one that does not round its inputs.
        dtype: of the model, which is that of its inputs.

    Attributes:
        weight: (G, N, P), as ``few_bits_kernels.few_bits_product`` reads it.
        scale_GN, offset_GN: float16. Without offsets, integers of four bits are stored with 8 added
            to them, which an offset takes back.
    """

    weight: Tensor
    scale_GN: Tensor
    offset_GN: Tensor | None

    def __init__(self, layer: GroupedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bits, self.dtype, self.bias = layer.bits, dtype, layer.bias
        values_GNK = layer.weight.view(self.out_features, -1, layer.grouped.group).transpose(0, 1)
        offset_NG = layer.offset_NG
        if self.bits == 4:
            if offset_NG is None:
                values_GNK, offset_NG = values_GNK + 8, -8 * layer.scale_NG
            low, high = values_GNK.to(torch.uint8).chunk(2, -1)
            values_GNK = low | high << 4
        self.register_buffer("weight", values_GNK.contiguous())
        self.register_buffer("scale_GN", layer.scale_NG.t().contiguous())
        offset_GN = None if offset_NG is None else offset_NG.t().contiguous()
        self.register_buffer("offset_GN", offset_GN)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, (..., K) to (..., N) in the dtype of x."""
        return self.product(x, self.weight, self.scale_GN, self.offset_GN, self.bias)

    @staticmethod
    def product(
        x: Tensor,
        weight: Tensor,
        scale_GN: Tensor,
        offset_GN: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The same with other parameters."""
        from outrider.runtime.kernels.few_bits_kernels import few_bits_product

        return few_bits_product(x, weight, scale_GN, offset_GN, bias)

    def extra_repr(self) -> str:
        group = self.in_features // self.weight.shape[0]
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group={group}"
        )


def use_few_bits_kernels(module: nn.Module) -> None:
    """Replaces the grouped layers of a module on a GPU that do not round their inputs, and whose
    groups are of 32, 64 or 128 inputs.

    Args:
        module: the model; changed in place.

    Raises:
        KernelError: Triton is missing, does not compile the kernels, or these compute something
            else than the layers' plain code.
    """
    if find_spec("triton") is None:
        raise KernelError("the kernels for GPUs need Triton, which is not installed")
    floats = (each.dtype for each in module.parameters() if each.is_floating_point())
    dtype, checked = next(floats, torch.float32), set()
    for path, layer in list(module.named_modules()):
        if isinstance(layer, GroupedLinear) and _is_supported(layer):
            kind = layer.bits, layer.grouped.group, layer.offset_NG is None
            replacement = FewBitsLinear(layer, dtype)
            if kind not in checked:
                _check(layer, replacement)
                checked.add(kind)
            module.set_submodule(path, replacement)


def _is_supported(layer: GroupedLinear) -> bool:
    return layer.grouped.group in (32, 64, 128) and not layer.rounds_inputs


@torch.no_grad()
def _check(layer: GroupedLinear, replacement: FewBitsLinear) -> None:
    few = example(layer.scale_NG.new_empty(layer.in_features, dtype=replacement.dtype))
    try:
        same = all(agree(replacement(x), layer(x)) for x in (few, few.repeat(20, 1)))
    except Exception as error:  # Triton's and its compilers' exceptions are of many kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise KernelError(f"Triton does not compile the kernels: {reason[0]}") from error
    if not same:
        raise KernelError(f"the kernel for {layer} computes something else than its plain code")
