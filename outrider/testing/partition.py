"""Cuts the cube of uniform numbers into boxes on which a program decides alike.

Random numbers are whole multiples of 2^-52, so a box has an exact volume, and its faces can be
found by section search on the program itself: nothing about its rules is written down twice.

The numbers are taken one after the other. For each box found so far, and for the next number, the
program is run with the earlier numbers at the box's middle and the later ones at a few reference
settings (all 0, all just below 1, some at random); the number's axis is cut wherever any of the
outcomes changes.

Assumptions, of which the first two hold for every rule made of thresholds and inverse CDFs:

- with all other numbers fixed, each outcome comes from one interval of a number (or is at least met
  by a grid of 17 points);
- where a number is cut depends on earlier numbers and not on later ones;
- whatever a number decides shows under one of the reference settings.

They are not taken on trust: at random points the boxes have to predict what the program does, and
AssertionError says so if they do not. An argmax over noisy scores (Gumbel) breaks the second.

Legend: B rows, J numbers, C boxes, R reference settings, P points on an axis, I intervals.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_ONE = 1 << 52
_GRID = 16
_NUM_CHECKS = 512
_ROWS_OF_A_CALL = 1000


@dataclass(frozen=True)
class Boxes:
    """A partition of the unit cube, in the order of their lower corners; corners in units of 2^-52,
    the upper ones excluded."""

    low_CJ: Tensor
    high_CJ: Tensor

    @property
    def volume_C(self) -> Tensor:
        return ((self.high_CJ - self.low_CJ).double() / _ONE).prod(1)

    @property
    def middle_CJ(self) -> Tensor:
        """A point of each box, as numbers in [0, 1)."""
        return _numbers((self.low_CJ + self.high_CJ) // 2)

    def holding(self, at_BJ: Tensor) -> Tensor:
        """The box that each point lies in, shape (B,), by binary search: along the first axis on
        which a point is outside a box, boxes lie in order."""
        first_B = torch.zeros(len(at_BJ), dtype=torch.int64)
        last_B = torch.full_like(first_B, len(self.low_CJ) - 1)
        while bool((first_B < last_B).any()):
            box_B = (first_B + last_B + 1) // 2
            below_BJ = at_BJ < self.low_CJ[box_B]
            outside_BJ = below_BJ | (at_BJ >= self.high_CJ[box_B])
            axis_B1 = outside_BJ.long().argmax(1, keepdim=True)
            before_B = below_BJ.gather(1, axis_B1)[:, 0]
            first_B = torch.where(before_B, first_B, box_B)
            last_B = torch.where(before_B, box_B - 1, last_B)
        return first_B


def partition(decide: Callable[[Tensor], Tensor], num_numbers: int, seed: int = 0) -> Boxes:
    """Boxes on which ``decide`` is constant.

    Args:
        decide: from numbers in [0, 1), shape (B, J), float64, to one int64 per row that stands for
            the outcome.
        num_numbers: J.
        seed: of the reference settings and of the check at random points.
    """
    generator = torch.Generator().manual_seed(seed)
    boxes = Boxes(
        torch.zeros(1, num_numbers, dtype=torch.int64),
        torch.full((1, num_numbers), _ONE, dtype=torch.int64),
    )
    for axis in range(num_numbers):
        random_RJ = torch.randint(_ONE, (3, num_numbers), generator=generator)
        ends_RJ = torch.tensor([[0], [_ONE - 1]]).expand(2, num_numbers)
        boxes = _cut(decide, boxes, axis, torch.cat([ends_RJ, random_RJ]))
    _check(decide, boxes, generator)
    return boxes


def _cut(decide: Callable[[Tensor], Tensor], boxes: Boxes, axis: int, later_RJ: Tensor) -> Boxes:
    C, J = boxes.low_CJ.shape
    if axis == J - 1:
        later_RJ = later_RJ[:1]
    middle_CJ = (boxes.low_CJ + boxes.high_CJ) // 2

    def outcome(box_I: Tensor, point_IP: Tensor) -> Tensor:
        """Outcomes under all reference settings, hashed together, (I, P)."""
        num_intervals, P = point_IP.shape
        R = later_RJ.shape[0]
        at_IPRJ = middle_CJ[box_I][:, None, None].repeat(1, P, R, 1)
        at_IPRJ[..., axis] = point_IP[..., None]
        at_IPRJ[..., axis + 1 :] = later_RJ[:, axis + 1 :]
        outcome_IPR = decide(_numbers(at_IPRJ.reshape(-1, J))).reshape(num_intervals, P, R)
        return combine(outcome_IPR)

    box_I = torch.arange(C)
    point_IP = torch.linspace(0, _ONE, _GRID + 1, dtype=torch.float64).long().repeat(C, 1)
    point_IP[:, -1] = _ONE - 1
    outcome_IP = outcome(box_I, point_IP)
    starts = [(box_I, torch.zeros(C, dtype=torch.int64))]
    while True:
        differ_IP = outcome_IP[:, 1:] != outcome_IP[:, :-1]
        box_I = box_I[:, None].expand_as(differ_IP)[differ_IP]
        a_I, b_I = point_IP[:, :-1][differ_IP], point_IP[:, 1:][differ_IP]
        outcome_a_I, outcome_b_I = outcome_IP[:, :-1][differ_IP], outcome_IP[:, 1:][differ_IP]
        done_I = b_I - a_I == 1
        starts.append((box_I[done_I], b_I[done_I]))
        box_I, a_I, b_I = box_I[~done_I], a_I[~done_I], b_I[~done_I]
        if not len(box_I):
            break
        sections = _sections(len(box_I) * len(later_RJ))
        inner_IP = a_I[:, None] + (b_I - a_I)[:, None] * torch.arange(1, sections) // sections
        inner_outcome_IP = outcome(box_I, inner_IP)
        point_IP = torch.cat([a_I[:, None], inner_IP, b_I[:, None]], 1)
        outcome_IP = torch.cat(
            [outcome_a_I[~done_I, None], inner_outcome_IP, outcome_b_I[~done_I, None]], 1
        )

    start_C = torch.cat([start for _, start in starts])
    box_C = torch.cat([box for box, _ in starts])
    order_C = start_C.argsort(stable=True)
    order_C = order_C[box_C[order_C].argsort(stable=True)]
    box_C, start_C = box_C[order_C], start_C[order_C]
    end_C = torch.full_like(start_C, _ONE)
    end_C[:-1] = torch.where(box_C[1:] == box_C[:-1], start_C[1:], _ONE)
    low_CJ, high_CJ = boxes.low_CJ[box_C], boxes.high_CJ[box_C]
    low_CJ[:, axis], high_CJ[:, axis] = start_C, end_C
    return Boxes(low_CJ, high_CJ)


def _sections(num_rows: int) -> int:
    """Into how many sections to cut intervals that take so many rows per point: as gains most per
    time, if a call takes as long as ``_ROWS_OF_A_CALL`` rows."""
    costs = {n: (_ROWS_OF_A_CALL + (n - 1) * num_rows) / math.log2(n) for n in (2, 4, 8, 16, 32)}
    return min(costs, key=costs.__getitem__)


def _check(decide: Callable[[Tensor], Tensor], boxes: Boxes, generator: torch.Generator) -> None:
    at_BJ = torch.randint(_ONE, (_NUM_CHECKS, boxes.low_CJ.shape[1]), generator=generator)
    box_B = boxes.holding(at_BJ)
    predicted_B, outcome_B = decide(boxes.middle_CJ[box_B]), decide(_numbers(at_BJ))
    wrong = int((predicted_B != outcome_B).sum())
    assert wrong == 0, (
        f"the enumeration mispredicts {wrong} of {_NUM_CHECKS} random points: some decision is "
        "no threshold function of its own uniform number; use chi2 for this method"
    )


def combine(parts: Tensor) -> Tensor:
    """Hashes the last dimension of an int64 tensor away: equal rows stay equal."""
    return (parts * _weights(parts.shape[-1])).sum(-1)


@cache
def _weights(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    return 2 * torch.randint(-(1 << 62), 1 << 62, (num,), generator=generator) + 1


def _numbers(units: Tensor) -> Tensor:
    return units.double() / _ONE
