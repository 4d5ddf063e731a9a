"""Programs that are not compiled: the Python code of a forward pass, a draft or a rule, called with
the inputs of its program. A CUDA graph captures the kernels that it launches (``cuda_graphs.py``).
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from outrider.runtime.executors.compile_cache import Program


class TakesInputs(Protocol):
    """What a program is compiled from: ``TreeForward`` or ``FusedLogitVerification``."""

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of a call, from the inputs of a program in their order."""

    def __call__(self, *arguments: Any) -> Sequence[Tensor]:
        """The outputs of the program."""


def own_code(module: TakesInputs) -> Program:
    """The program that a module's own code is."""

    def run(inputs: list[Tensor]) -> list[Tensor]:
        return list(module(*module.arguments(inputs)))

    return run
