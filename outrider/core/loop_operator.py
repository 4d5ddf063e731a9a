"""A loop as one operator of a program that is being traced.

The operator wants each tensor that its steps read as an input. ``torch.while_loop`` finds these by
running the bytecode of the steps symbolically, which takes as long as the rest of tracing or
longer. Here a dry run, one step that is not recorded, tells what the steps read.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import SymInt, Tensor
from torch._guards import detect_fake_mode
from torch._higher_order_ops.while_loop import while_loop_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LoopState = tuple[Tensor, ...]

_IS_DRY_RUN = ContextVar("_IS_DRY_RUN", default=False)
"""Whether a step is computed only to see what it reads. Loops within it then take one step."""


def loop_operator(
    goes_on: Callable[..., Tensor], step: Callable[..., LoopState], state: LoopState
) -> LoopState:
    """Applies ``step`` as long as ``goes_on``, in the program that is being traced: arguments as of
    ``repeat_while``. Both functions may read any tensors of that program."""
    if _IS_DRY_RUN.get():
        goes_on(*state)
        return step(*state)

    def of_state(function: Callable[..., Any]) -> Callable[..., Any]:
        # The inputs are the very tensors that the function reads by itself.
        return lambda *given: function(*given[: len(state)])

    loop: Any = while_loop_op
    found: LoopState = loop(of_state(goes_on), of_state(step), state, _inputs(goes_on, step, state))
    return found


def _inputs(
    goes_on: Callable[..., Tensor], step: Callable[..., LoopState], state: LoopState
) -> tuple[Tensor | SymInt, ...]:
    """What the two functions read besides the state: tensors, and the symbols of sizes that none of
    these tensors has."""
    fake_mode: Any = detect_fake_mode(state)
    shape_env = fake_mode.shape_env
    known = set(shape_env.var_to_range)
    token = _IS_DRY_RUN.set(True)
    try:
        with (
            disable_proxy_modes_tracing(),
            shape_env.ignore_fresh_unbacked_symbols(),
            _Reads(state) as reads,
        ):
            goes_on(*state)
            step(*state)
    finally:
        _IS_DRY_RUN.reset(token)
    tensors = tuple(reads.found.values())
    sizes = [size for each in (*state, *tensors) for size in each.shape]
    in_shapes = {size.node.expr for size in sizes if _is_symbolic(size)}
    symbols = sorted((reads.symbols & known) - in_shapes, key=str)
    return *tensors, *(shape_env.create_symintnode(each, hint=None) for each in symbols)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that operators read and that were neither given nor computed within, and
    the symbols of the sizes among operators' arguments."""

    def __init__(self, given: LoopState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {id(each): each for each in given}
        self.found: dict[int, Tensor] = {}
        self.symbols: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            # Tensors of another kind are constants, which become part of the loop.
            if isinstance(each, FakeTensor) and id(each) not in self.known:
                self.found[id(each)] = each
            elif _is_symbolic(each):
                self.symbols |= each.node.expr.free_symbols
        results = func(*args, **(kwargs or {}))
        self.known |= {id(each): each for each in tree_leaves(results) if isinstance(each, Tensor)}
        return results


def _is_symbolic(size: object) -> bool:
    return isinstance(size, SymInt) and size.node.is_symbolic()
