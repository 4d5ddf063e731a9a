"""Whether a compiled program computes what the model computes, up to the rounding of its precision.

A program rounds elsewhere than the model does: it adds in another order, and keeps in float32 what
the model rounds between its operations. Two bounds tell such a program from a wrong one.

- The error over all logits is at most 4 ε of their size in half precisions, and √ε in float32,
  where ε is so small that orders of summation count for more. Measured in bfloat16 against float32:
  0.9 ε for trained models of 1 and 16 layers, 3 ε for random ones.
- The scale of all logits is off by at most ε / 2, or by ε in fused drafts, whose steps read what
  those before them rounded. Roundings cancel over thousands of logits (measured: ε / 7 at most, and
  in drafts of an EAGLE-3 head ε / 3), so that this finds a wrong factor that the first bound
  allows.

ε is that of the precision that the model computes in, not of the output: a fused draft returns
float32 numbers that were computed in bfloat16. Layers that round their inputs to eight bits
(``kernels/grouped.py``) turn a difference in the last bit into a step of such an input, a 127th of
the largest in its group, and ε is 2⁻⁵ with them. (Measured: errors of at most 2.5 %, and scales
that are off by at most 1 %.)

Legend: B rows, N query tokens, D drafted tokens, P positions compared, V vocabulary.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.runtime.executors.traced import TreeForward
from outrider.runtime.executors.traced_cache import KVBuffers
from outrider.runtime.kernels import rounds_inputs
from outrider.runtime.kernels.exact import exact_mode

_SIZES = ((1, 1, 7, 7), (3, 4, 9, 12))
"""Rows, query tokens, span and slots to compare with: sizes that no program is traced with."""

_ROUNDED_INPUTS = 2.0**-5
"""ε of models with layers that round their inputs to eight bits."""


def compare(each: TreeForward, program: Program, buffers: KVBuffers, *, bits: bool = False) -> str:
    """How a program's results differ from those of its forward pass; "" where they agree.

    Args:
        each: the forward pass.
        program: the compiled program of it.
        buffers: keys and values like those that it runs over.
        bits: whether they may not differ in a single bit, as those of exact models may not.
    """
    wanted_PV, found_PV, follows = [], [], True
    wanted_PH: list[Tensor] = []
    found_PH: list[Tensor] = []
    for sizes in _SIZES:
        with torch.inference_mode():
            with exact_mode() if bits else nullcontext():
                inputs = _examples(each, buffers, sizes)
            found = each.results(program(flat(inputs)), *inputs[-2:])
            with exact_mode() if bits else nullcontext():
                others = _examples(each, buffers, sizes)  # a forward pass writes to its KV buffers
                wanted = each.results(each(*others), *others[-2:])
        if isinstance(each, GreedyDraft):
            follows &= _follows(each, inputs, found)
            same_BD = each.same(wanted, found)
            wanted_PV.append(wanted[0][:, :-1][same_BD])
            found_PV.append(found[0][:, :-1][same_BD])
        else:
            wanted_PV.append(wanted[0].flatten(0, 1))
            found_PV.append(found[0].flatten(0, 1))
            wanted_PH += [hidden_BNH.flatten(0, 1) for hidden_BNH in wanted[2:]]
            found_PH += [hidden_BNH.flatten(0, 1) for hidden_BNH in found[2:]]
    one_PV, other_PV = torch.cat(wanted_PV).double(), torch.cat(found_PV).double()
    if bits and not torch.equal(one_PV, other_PV):
        return "its results are not the model's to the bit"
    if isinstance(each, SampledDraft):
        one_PV, other_PV = _logarithm(one_PV), _logarithm(other_PV)
    masked = torch.finfo(each.dtype).min / 2  # a model may hide tokens itself (``core/health.py``)
    hidden_PV = one_PV < masked
    if not torch.equal(hidden_PV, other_PV < masked):
        return "it masks other tokens than the model"
    one_PV, other_PV = one_PV.masked_fill(hidden_PV, 0), other_PV.masked_fill(hidden_PV, 0)
    allowed = 1 if isinstance(each, GreedyDraft) else 0.5
    precision = Precision.of(each)
    difference = _error(one_PV, other_PV, precision) or _scale(one_PV, other_PV, precision, allowed)
    if not difference and wanted_PH:
        one_PH, other_PH = torch.cat(wanted_PH).double(), torch.cat(found_PH).double()
        difference = _error(one_PH, other_PH, precision)
    if difference or follows:
        return difference
    return "its drafted tokens do not follow from the distributions that it returns"


def flat(inputs: Sequence[Tensor | Sequence[Tensor]]) -> list[Tensor]:
    """The inputs of a forward pass as its program takes them."""
    lists = ([each] if isinstance(each, Tensor) else each for each in inputs)
    return [tensor for each in lists for tensor in each]


class Precision(NamedTuple):
    """The precision that a model computes in.

    Attributes:
        name: in messages.
        epsilon: ε.
        coarse: whether ε counts for more than orders of summation.
    """

    name: str
    epsilon: float
    coarse: bool

    @classmethod
    def of(cls, each: TreeForward) -> "Precision":
        """That of a forward pass."""
        name = str(each.dtype).removeprefix("torch.")
        if rounds_inputs(each.module):
            return cls(f"{name} with inputs of 8 bits", _ROUNDED_INPUTS, True)
        info = torch.finfo(each.dtype)
        return cls(name, info.eps, info.bits == 16)

    @property
    def allowed_error(self) -> float:
        """The most that logits may be off, relative to their size, both as Euclidean norms."""
        return 4 * self.epsilon if self.coarse else math.sqrt(self.epsilon)


def _error(wanted_PV: Tensor, found_PV: Tensor, precision: Precision) -> str:
    """By how much the logits differ, and where most; "" where that is little enough."""
    error_PV = found_PV - wanted_PV
    off = float(error_PV.norm() / wanted_PV.norm())
    if off <= precision.allowed_error:
        return ""
    off_P = (error_PV.norm(dim=1) / wanted_PV.norm(dim=1)).nan_to_num(torch.inf)
    worst = int(off_P.argmax())
    return (
        f"its results differ from the model's: error {off:.2%} of the logits' size where "
        f"{precision.allowed_error:.2%} is allowed in {precision.name}, largest at position "
        f"{worst + 1} of {len(off_P)}: {float(off_P[worst]):.2%}"
    )


def _scale(wanted_PV: Tensor, found_PV: Tensor, precision: Precision, allowed: float) -> str:
    """What is wrong with the size of all logits together; "" where it is off by at most ``allowed``
    ε."""
    off = float((wanted_PV * found_PV).sum() / wanted_PV.square().sum()) - 1
    allowed *= precision.epsilon
    if not precision.coarse or abs(off) <= allowed:
        return ""
    return (
        f"its results differ from the model's: all logits are {abs(off):.2%} too "
        f"{'large' if off > 0 else 'small'} where {allowed:.2%} is allowed in "
        f"{precision.name}"
    )


def _follows(each: GreedyDraft, inputs: Sequence[Any], found: Sequence[Tensor]) -> bool:
    """Whether the chain begins at the root, and its tokens follow from what is recorded of them."""
    chain_BN = found[2]
    from_root = torch.equal(chain_BN[:, 0], each.roots(inputs))
    return from_root and each.follows(inputs, found[0][:, :-1], chain_BN[:, 1:])


def _logarithm(probs_PV: Tensor) -> Tensor:
    """Log-probabilities: logits up to a constant, whose errors are those of logits."""
    return probs_PV.clamp(min=torch.finfo(torch.float32).tiny).log()


def _examples(
    each: TreeForward, buffers: KVBuffers, sizes: tuple[int, int, int, int]
) -> tuple[Any, ...]:
    """Inputs of these sizes, over the keys and values of other tokens.

    The model computes these keys and values. Random ones are unlike any that it has seen, and a
    deep model turns the rounding of a single operator over them into other logits.
    """
    tokens_BN, *rest, keys, values = each.inputs(buffers, *sizes)
    rows, _, slots, _ = keys[0].shape
    each.fill(_various(each, tokens_BN.new_zeros(rows, slots), 53), keys, values)
    return _various(each, tokens_BN, 37), *rest, keys, values


def _various(each: TreeForward, tokens_BN: Tensor, stride: int) -> Tensor:
    """As many tokens, of various numbers."""
    config: Any = each.module.config
    index_BN = torch.arange(tokens_BN.numel(), device=tokens_BN.device).view_as(tokens_BN)
    return (stride * index_BN + 11) % config.get_text_config().vocab_size
