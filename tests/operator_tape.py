"""A stand-in for CUDA graphs on a CPU: records the operators of a run and replays them.

Like a CUDA graph it refers to tensors by address, does not see the Python code between operators,
and rejects what stream capture rejects: reading a value on the host, copying a value from the host,
and results whose size depends on values. Unlike a CUDA graph, it computes while it records.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Any = torch.ops.aten
_NOT_CAPTURABLE = {
    _aten._local_scalar_dense: "reads a value on the host",
    _aten.equal: "reads values on the host",
    _aten.is_nonzero: "reads a value on the host",
    _aten.lift_fresh: "copies values from the host",
    _aten.nonzero: "has a result whose size depends on values",
    _aten.masked_select: "has a result whose size depends on values",
    _aten._unique2: "has a result whose size depends on values",
}
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_)


class Tape(TorchDispatchMode):
    """A context manager that records the operators that run inside it.

    Raises:
        RuntimeError: an operator ran that stream capture rejects.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[Tensor]]] = []

    @property
    def num_computing(self) -> int:
        """How many operators do more than return a view of what they are given."""
        return sum(not func.is_view for func, *_ in self._steps)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        problem = _NOT_CAPTURABLE.get(func.overloadpacket)
        if func.overloadpacket in _INDEXING and _has_booleans(args):
            problem = "has a result whose size depends on values"
        if problem is not None:
            raise RuntimeError(f"operation not permitted while recording: {func} {problem}")
        result = func(*args, **(kwargs or {}))
        kept = _tensors(result)
        if kept:
            self._steps.append((func, args, kwargs or {}, kept))
        return result

    def replay(self) -> None:
        """Runs the recorded operators again on the same tensors."""
        for func, args, kwargs, kept in self._steps:
            for held, new in zip(kept, _tensors(func(*args, **kwargs)), strict=True):
                if (
                    held.data_ptr() != new.data_ptr()
                ):  # otherwise the operator wrote in place or returned a view
                    held.copy_(new)


def record_on_tape(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """Records ``run``. Returns a function that replays its operators, and the result tensors.

    Raises:
        RuntimeError: ``run`` uses an operator that stream capture rejects.
    """
    with Tape() as tape:
        results = run()
    return tape.replay, results


def _tensors(result: Any) -> list[Tensor]:
    each_of = result if isinstance(result, tuple | list) else [result]
    return [each for each in each_of if isinstance(each, Tensor)]


def _has_booleans(args: Sequence[Any]) -> bool:
    return any(each is not None and each.dtype == torch.bool for each in args[1])
