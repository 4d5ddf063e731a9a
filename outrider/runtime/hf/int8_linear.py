"""A linear layer with int8 weights that torchao rounds and torch's packed kernel multiplies.

The kernel is vectorised for bfloat16 only, so inputs and outputs of a layer are rounded to
bfloat16, an eighth of the error of int8 weights. Our own kernels (``runtime/kernels``), where a
model uses them, take the layer over and round nothing.

Legend: M query tokens of all rows, K inputs, N outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """int8 weights with a scale per output on the CPU, multiplied by torch's packed kernel, which
    needs a K that is a multiple of 16.

    Attributes:
        weight: the integers; int8, so that T5 does not convert its activations to their dtype.
    """

    weight: Tensor
    scale_N: Tensor

    def __init__(self, linear: nn.Linear, torchao: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        rounded = torchao.Int8Tensor.from_hp(linear.weight.detach().float(), torchao.PerRow())
        self.register_buffer("weight", rounded.qdata)
        self.register_buffer("scale_N", rounded.scale.flatten().to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, (…, K) to (…, N) in the dtype of x."""
        x_MK = x.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        y_MN = torch._weight_int8pack_mm(x_MK, self.weight, self.scale_N).to(x.dtype)
        if self.bias is not None:
            y_MN = y_MN + self.bias
        return y_MN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
