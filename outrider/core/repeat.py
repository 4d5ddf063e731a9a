"""A loop of unknown length over tensors: a Python loop, or an operator of a traced program.

Rules that solve for a number, or that verify no more than is reached, iterate until a tensor says
that they are done. Eager code reads that tensor; a program that is being traced cannot, and gets
the loop as one operator, which reads it without Python. A CUDA graph has no such operator: where it
is known how many steps suffice, captured code always computes so many.

Legend: B rows, R rows of numbers that are searched for, E ends of sections.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.core.loop_operator import LoopState, loop_operator
from outrider.core.recording import CaptureError, is_captured, is_recorded


def repeat_while(
    goes_on: Callable[..., Tensor],
    step: Callable[..., LoopState],
    state: LoopState,
    *,
    at_most: int | None = None,
) -> LoopState:
    """Applies ``step`` as long as ``goes_on``, a boolean tensor of one number, is true.

    Args:
        goes_on: takes the state.
        step: takes the state and returns the next one: new tensors of the same shapes and dtypes.
        state: the initial state.
        at_most: upper bound, for all inputs, on the number of steps; None where there is none, or
            where it is large. Only captured code depends on it: it always computes this many steps,
            and discards the results of those that come after the last.

    Raises:
        CaptureError: the operators are captured in a CUDA graph, and ``at_most`` is None.
    """
    if is_captured():
        if at_most is None:
            raise CaptureError("a loop of unknown length")
        for _ in range(at_most):
            state = apply_if(goes_on(*state), step, state)
        return state
    if torch.compiler.is_compiling():
        return loop_operator(goes_on, step, state)
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


def narrow(
    is_below: Callable[[Tensor], Tensor],
    low_R1: Tensor,
    high_R1: Tensor,
    num_sections: int,
    num_steps: int,
) -> Tensor:
    """Searches for a number by dividing an interval again and again, as bisection does, but into
    more sections than two. Returns the upper end of the last interval, (R, 1).

    The number of kernels is small and does not depend on the numbers, so that captured code can
    search by it.

    Args:
        is_below: takes numbers (R, E), and says of each whether it is below the number searched
            for.
        low_R1: the lower end of the first interval.
        high_R1: its upper end. It is returned if all numbers between the two are below.
        num_sections: how many sections a step divides an interval into. It goes on with one.
        num_steps: the result is at most ``(high - low) / num_sections ** num_steps`` above the
            number searched for, up to rounding.
    """
    share_E = torch.arange(num_sections + 1, dtype=low_R1.dtype, device=low_R1.device)
    share_E = share_E / num_sections
    for _ in range(num_steps):
        end_RE = torch.lerp(low_R1, high_R1, share_E)
        section_R1 = is_below(end_RE[:, 1:-1]).sum(1, keepdim=True)
        low_R1, high_R1 = end_RE.gather(1, section_R1), end_RE.gather(1, section_R1 + 1)
    return high_R1
