"""A tensor that is computed when it is first read.

A round's results are read by whoever asks for them. Most rounds are asked for few, so what a
verification program need not compute is left to the reader.
"""

from collections.abc import Callable
from functools import cached_property

from torch import Tensor


class Deferred:
    """Computes a tensor once, when it is read.

    Args:
        compute: depends on nothing that changes between its creation and the reading.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    @classmethod
    def known(cls, tensor: Tensor) -> "Deferred":
        """A tensor that is there already."""
        return cls(lambda: tensor)

    @cached_property
    def value(self) -> Tensor:
        """The tensor."""
        return self._compute()
