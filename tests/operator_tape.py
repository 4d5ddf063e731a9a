"""A stand-in for CUDA graphs on a CPU: records the operators of a run, and replays them alone.

Like a CUDA graph it holds tensors by their place, knows nothing of the Python between them, and
refuses what a capturing stream refuses: looking at a number, copying one from the host, results
whose sizes depend on numbers. Unlike one it computes already while it records.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Any = torch.ops.aten
_REFUSED = {
    _aten._local_scalar_dense: "looks at a number",
    _aten.equal: "looks at numbers",
    _aten.is_nonzero: "looks at a number",
    _aten.lift_fresh: "copies numbers from the host",
    _aten.nonzero: "has a result of a size that depends on numbers",
    _aten.masked_select: "has a result of a size that depends on numbers",
    _aten._unique2: "has a result of a size that depends on numbers",
}
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_)


class Tape(TorchDispatchMode):
    """Records what runs inside it.

    Raises:
        RuntimeError: inside it, an operator that a capturing stream refuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        refused = _REFUSED.get(func.overloadpacket)
        if func.overloadpacket in _INDEXING and _has_booleans(args):
            refused = "has a result of a size that depends on numbers"
        if refused is not None:
            raise RuntimeError(f"operation not permitted while recording: {func} {refused}")
        result = func(*args, **(kwargs or {}))
        kept = _tensors(result)
        if kept:
            self._steps.append((func, args, kwargs or {}, kept))
        return result

    def replay(self) -> None:
        """Runs the operators again, on the same tensors."""
        for func, args, kwargs, kept in self._steps:
            for held, new in zip(kept, _tensors(func(*args, **kwargs)), strict=True):
                if held.data_ptr() != new.data_ptr():  # else written in place, or a view
                    held.copy_(new)


def record_on_tape(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """What replays all operators of ``run``, and the tensors where it leaves the results.

    Raises:
        RuntimeError: an operator that a capturing stream refuses.
    """
    with Tape() as tape:
        results = run()
    return tape.replay, results


def _tensors(result: Any) -> list[Tensor]:
    each_of = result if isinstance(result, tuple | list) else [result]
    return [each for each in each_of if isinstance(each, Tensor)]


def _has_booleans(args: Sequence[Any]) -> bool:
    return any(each is not None and each.dtype == torch.bool for each in args[1])
