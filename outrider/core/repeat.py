"""A loop of unknown length over tensors: a Python loop, or an operator of a traced program.

Rules that solve for a number, or that verify no more than is reached, iterate until a tensor says
that they are done. Eager code reads that tensor; a program that is being traced cannot, and gets
the loop as one operator, which reads it without Python. A CUDA graph has no such operator.

Legend: B rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from outrider.core.recording import CaptureError, is_captured, is_recorded

LoopState = tuple[Tensor, ...]


def repeat_while(
    goes_on: Callable[..., Tensor], step: Callable[..., LoopState], state: LoopState
) -> LoopState:
    """Applies ``step`` as long as ``goes_on``, a boolean tensor of one number, is true.

    Args:
        goes_on: takes the state.
        step: takes the state and returns the next one: new tensors of the same shapes and dtypes.
        state: the initial state.

    Raises:
        CaptureError: the operators are captured in a CUDA graph.
    """
    if is_captured():
        raise CaptureError("a loop of unknown length")
    if torch.compiler.is_compiling():
        found: LoopState = while_loop(goes_on, step, state)  # type: ignore[no-untyped-call]
        return found
    while goes_on(*state):
        state = step(*state)
    return state


def apply_if(condition: Tensor, step: Callable[..., LoopState], state: LoopState) -> LoopState:
    """Applies ``step`` where ``condition``, a boolean tensor of one number, is true: in a traced
    program, a loop of no or one step; where operators are captured, the step is always computed.
    Arguments as of :func:`repeat_while`."""
    if is_captured():
        pairs = zip(step(*state), state, strict=True)
        return tuple(torch.where(condition, new, old) for new, old in pairs)
    if not torch.compiler.is_compiling():
        return step(*state) if condition else state

    def is_open(done: Tensor, *_: Tensor) -> Tensor:
        return ~done

    def once(done: Tensor, *state: Tensor) -> LoopState:
        return torch.ones_like(done), *step(*state)

    return repeat_while(is_open, once, (~condition, *state))[1:]


def rows_of(open_B: Tensor) -> Tensor:
    """The rows that a step has to work on, for ``open_B`` (B,): where operators are recorded, whose
    shapes do not depend on numbers, all of them. The caller keeps what the others have."""
    if is_recorded():
        return torch.arange(open_B.shape[0], device=open_B.device)
    return open_B.nonzero()[:, 0]
