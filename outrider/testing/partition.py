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
_COARSE = 1 << 38  # of 2^52: boxes thinner than that are rare, and cost a second search


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
    settings_JRJ = torch.zeros(num_numbers, 5, num_numbers, dtype=torch.int64)
    settings_JRJ[:, 1] = _ONE - 1
    for setting_RJ in settings_JRJ:
        setting_RJ[2:] = torch.randint(_ONE, (3, num_numbers), generator=generator)
    program = _Program(decide, settings_JRJ)
    boxes = _boxes(program, _COARSE) or _boxes(program, 1)
    assert boxes is not None
    _check(decide, boxes, generator)
    return boxes


@dataclass(frozen=True)
class _Program:
    """What is cut, and the settings of later numbers at which each axis is searched, (J, R, J)."""

    decide: Callable[[Tensor], Tensor]
    settings_JRJ: Tensor

    def outcomes(
        self, axis_I: Tensor, earlier_IJ: Tensor, point_IP: Tensor, setting_IR: Tensor
    ) -> Tensor:
        """Outcomes at points of one axis each, under some of its settings, (I, P, R)."""
        I, P = point_IP.shape  # noqa: E741
        R, J = setting_IR.shape[1], earlier_IJ.shape[1]
        number_J, axis_I1 = torch.arange(J), axis_I[:, None]
        later_IRJ = self.settings_JRJ[axis_I1, setting_IR]
        at_IRJ = torch.where((number_J < axis_I1)[:, None], earlier_IJ[:, None], later_IRJ)
        at_IPRJ = at_IRJ[:, None].repeat(1, P, 1, 1)
        own_IPRJ = (number_J == axis_I1)[:, None, None].expand(I, P, R, J)
        at_IPRJ[own_IPRJ] = point_IP[..., None].expand(I, P, R).flatten()
        return self.decide(_numbers(at_IPRJ.reshape(-1, J))).reshape(I, P, R)

    def all_settings(self, axis_I: Tensor) -> Tensor:
        """The numbers of all settings of an axis, (I, R): one where no number is later."""
        J, R = self.settings_JRJ.shape[:2]
        R = 1 if int(axis_I[0]) == J - 1 else R
        return torch.arange(R).expand(len(axis_I), R)


@dataclass(frozen=True)
class _Faces:
    """Faces between boxes: each lies in an interval of its axis, the lower end excluded.

    Attributes:
        axis_F: the axis.
        earlier_FJ: the earlier numbers of a point of the box that the face cuts.
        low_F, high_F: the ends of the interval, one below the face, one at it or above.
        low_FR, high_FR: the outcomes there under each setting.
    """

    axis_F: Tensor
    earlier_FJ: Tensor
    low_F: Tensor
    high_F: Tensor
    low_FR: Tensor
    high_FR: Tensor


def _boxes(program: _Program, width: int) -> Boxes | None:
    """The boxes, whose structure is found axis by axis, up to intervals of some width in which the
    faces lie, and whose faces are then found together. None if some box hides in such an interval:
    then the width has to be 1."""
    J = program.settings_JRJ.shape[0]
    first_CJ, last_CJ = torch.zeros(1, J, dtype=torch.int64), torch.full((1, J), _ONE - 1)
    low_CJ, high_CJ = torch.zeros_like(first_CJ), torch.ones_like(first_CJ)  # numbers of faces
    places = [torch.tensor([0, _ONE])]  # of the first faces, the ends of every axis
    num_faces, unknown = 2, []
    for axis in range(J):
        middle_CJ = (first_CJ + last_CJ) // 2
        box_F, faces = _faces(program, axis, middle_CJ, width)
        if width == 1:
            places.append(faces.high_F)
        else:
            unknown.append(faces)
        C, F = len(first_CJ), len(box_F)
        face_F = torch.arange(num_faces, num_faces + F)
        num_faces += F
        box_D = torch.cat([torch.arange(C), box_F])
        first_D = torch.cat([torch.zeros(C, dtype=torch.int64), faces.high_F])
        order_D = _in_order(box_D, first_D)
        box_D, first_D = box_D[order_D], first_D[order_D]
        low_D = torch.cat([torch.zeros(C, dtype=torch.int64), face_F])[order_D]
        ends_D = torch.cat([torch.zeros(C, dtype=torch.int64), faces.low_F])[order_D]
        last_D, high_D = torch.full_like(low_D, _ONE - 1), torch.ones_like(low_D)
        same_D = box_D[1:] == box_D[:-1]
        last_D[:-1] = torch.where(same_D, ends_D[1:], last_D[:-1])
        high_D[:-1] = torch.where(same_D, low_D[1:], high_D[:-1])
        first_CJ, last_CJ = first_CJ[box_D], last_CJ[box_D]
        low_CJ, high_CJ = low_CJ[box_D], high_CJ[box_D]
        first_CJ[:, axis], last_CJ[:, axis] = first_D, last_D
        low_CJ[:, axis], high_CJ[:, axis] = low_D, high_D
    if unknown:
        found = _refined(program, unknown)
        if found is None:
            return None
        places.append(found)
    place = torch.cat(places)
    return Boxes(place[low_CJ], place[high_CJ])


def _faces(program: _Program, axis: int, middle_CJ: Tensor, width: int) -> tuple[Tensor, _Faces]:
    """The faces that cut boxes along an axis, up to a width, and which box each cuts, (F,)."""
    C = len(middle_CJ)

    def outcomes(box_I: Tensor, point_IP: Tensor) -> Tensor:
        axis_I = torch.full_like(box_I, axis)
        settings_IR = program.all_settings(axis_I)
        return program.outcomes(axis_I, middle_CJ[box_I], point_IP, settings_IR)

    box_I = torch.arange(C)
    point_IP = torch.linspace(0, _ONE, _GRID + 1, dtype=torch.float64).long().repeat(C, 1)
    point_IP[:, -1] = _ONE - 1
    outcome_IPR = outcomes(box_I, point_IP)
    done: list[tuple[Tensor, ...]] = []
    while True:
        differ_IP = (outcome_IPR[:, 1:] != outcome_IPR[:, :-1]).any(-1)
        box_I = box_I[:, None].expand_as(differ_IP)[differ_IP]
        ends = (point_IP[:, :-1], point_IP[:, 1:], outcome_IPR[:, :-1], outcome_IPR[:, 1:])
        low_I, high_I, low_IR, high_IR = (each[differ_IP] for each in ends)
        narrow_I = high_I - low_I <= width
        done.append(tuple(each[narrow_I] for each in (box_I, low_I, high_I, low_IR, high_IR)))
        wide_I = ~narrow_I
        if not bool(wide_I.any()):
            break
        box_I, low_I, high_I = box_I[wide_I], low_I[wide_I], high_I[wide_I]
        point_IP = _sections(low_I, high_I, low_IR.shape[1])
        inner_IPR = outcomes(box_I, point_IP[:, 1:-1])
        outcome_IPR = torch.cat([low_IR[wide_I, None], inner_IPR, high_IR[wide_I, None]], 1)
    box_F, low_F, high_F, low_FR, high_FR = (torch.cat(each) for each in zip(*done, strict=True))
    axis_F = torch.full_like(box_F, axis)
    return box_F, _Faces(axis_F, middle_CJ[box_F], low_F, high_F, low_FR, high_FR)


def _refined(program: _Program, unknown: list[_Faces]) -> Tensor | None:
    """Where faces of all axes are exactly, (F,): each found under one setting that shows it, and
    held against all; None if there is more to an interval than one face."""
    axis_F = torch.cat([faces.axis_F for faces in unknown])
    earlier_FJ = torch.cat([faces.earlier_FJ for faces in unknown])
    low_F = torch.cat([faces.low_F for faces in unknown])
    high_F = torch.cat([faces.high_F for faces in unknown])
    shown = [(faces.low_FR != faces.high_FR).long().argmax(1) for faces in unknown]
    setting_F1 = torch.cat(shown)[:, None]
    ends = [
        torch.stack([faces.low_FR, faces.high_FR], 1)[torch.arange(len(at_F)), :, at_F]
        for faces, at_F in zip(unknown, shown, strict=True)
    ]
    low_outcome_F1, high_outcome_F1 = torch.cat(ends).split(1, 1)
    while bool((high_F - low_F > 1).any()):
        point_FP = _sections(low_F, high_F)
        inner_FP1 = program.outcomes(axis_F, earlier_FJ, point_FP[:, 1:-1], setting_F1)
        outcome_FP = torch.cat([low_outcome_F1, inner_FP1[..., 0], high_outcome_F1], 1)
        differ_FP = outcome_FP[:, 1:] != outcome_FP[:, :-1]
        if bool((differ_FP.sum(1) != 1).any()):
            return None
        at_F1 = differ_FP.long().argmax(1, keepdim=True)
        low_F, high_F = point_FP.gather(1, at_F1)[:, 0], point_FP.gather(1, at_F1 + 1)[:, 0]
    beside_F2 = torch.stack([high_F - 1, high_F], 1)
    is_last_F = axis_F == len(program.settings_JRJ) - 1
    groups = ([*unknown[:-1]], ~is_last_F), ([unknown[-1]], is_last_F)
    for group, in_F in groups:
        if bool(in_F.any()):
            settings_FR = program.all_settings(axis_F[in_F])
            found_F2R = program.outcomes(
                axis_F[in_F], earlier_FJ[in_F], beside_F2[in_F], settings_FR
            )
            wanted = [torch.stack([faces.low_FR, faces.high_FR], 1) for faces in group]
            if not torch.equal(found_F2R, torch.cat(wanted)):
                return None
    return high_F


def _in_order(first: Tensor, second: Tensor) -> Tensor:
    """What sorts pairs of numbers."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]


def _sections(low_I: Tensor, high_I: Tensor, rows_per_point: int = 1) -> Tensor:
    """Points that cut intervals into equal sections, ends included, (I, P): into as many as gain
    most per time, if a call takes as long as ``_ROWS_OF_A_CALL`` rows."""
    rows = len(low_I) * rows_per_point
    costs = {n: (_ROWS_OF_A_CALL + (n - 1) * rows) / math.log2(n) for n in (2, 4, 8, 16, 32)}
    num = min(costs, key=costs.__getitem__)
    return low_I[:, None] + (high_I - low_I)[:, None] * torch.arange(num + 1) // num


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
