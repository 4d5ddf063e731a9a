"""Partitions the unit cube of a program's random numbers into cells with constant outcome.

Random numbers are integer multiples of 2^-52, so every cell (a box) has an exact volume, and its
faces can be found by searching on the program itself. No rule has to be implemented a second time.

The numbers are processed one after the other. For each cell found so far and for the next number,
the program runs with the earlier numbers at the middle of the cell and the later numbers at a few
reference settings (all 0, all just below 1, some random). The axis of the number is cut wherever
the outcome changes under any of the settings.

Assumptions, of which the first two hold for every rule made of thresholds and inverse CDFs:

- with all other numbers fixed, the values of a number that lead to the same outcome form an
  interval (or at least, a grid of 17 points hits each of their intervals);
- the cuts along a number depend on earlier numbers only;
- every effect of a number is visible under one of the reference settings.

The assumptions are checked: the cells must predict the outcomes at random points, otherwise
``partition`` raises AssertionError. An argmax over noisy scores (Gumbel) violates the second.

Legend: B rows, J random numbers, C cells, A reference settings of later numbers, P points on an
axis, I intervals, F faces.
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
_ROWS_PER_CALL = 1000  # the overhead of a call, in rows
_COARSE = 1 << 38  # of 2^52: thinner cells are rare, and cost a second search


@dataclass(frozen=True)
class Boxes:
    """A partition of the unit cube into boxes, ordered by lower corner; corners in units of 2^-52.

    A box includes its lower faces and excludes its upper ones.
    """

    low_CJ: Tensor
    high_CJ: Tensor

    @property
    def volume_C(self) -> Tensor:
        return ((self.high_CJ - self.low_CJ).double() / _ONE).prod(1)

    @property
    def middle_CJ(self) -> Tensor:
        """The middle of each cell, as numbers in [0, 1)."""
        return _numbers((self.low_CJ + self.high_CJ) // 2)

    def holding(self, at_BJ: Tensor) -> Tensor:
        """The cell that contains each point, shape (B,), by binary search: the first axis on which
        a point lies outside a cell tells on which side the right cell is."""
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
    """The cells on which ``decide`` is constant.

    Args:
        decide: maps numbers in [0, 1), shape (B, J), float64, to one int64 per row that identifies
            the outcome.
        num_numbers: J.
        seed: seed of the reference settings and of the check at random points.

    Raises:
        AssertionError: the cells mispredict an outcome at a random point.
    """
    generator = torch.Generator().manual_seed(seed)
    settings_JAJ = torch.zeros(num_numbers, 5, num_numbers, dtype=torch.int64)
    settings_JAJ[:, 1] = _ONE - 1
    for setting_AJ in settings_JAJ:
        setting_AJ[2:] = torch.randint(_ONE, (3, num_numbers), generator=generator)
    program = _Program(decide, settings_JAJ)
    boxes = _boxes(program, _COARSE) or _boxes(program, 1)
    assert boxes is not None
    _check(decide, boxes, generator)
    return boxes


@dataclass(frozen=True)
class _Program:
    """The program, and the reference settings at which each axis is searched, (J, A, J)."""

    decide: Callable[[Tensor], Tensor]
    settings_JAJ: Tensor

    def outcomes(
        self, axis_I: Tensor, earlier_IJ: Tensor, point_IP: Tensor, setting_IA: Tensor
    ) -> Tensor:
        """The outcomes at points of one axis each, under some of its settings, (I, P, A)."""
        I, P = point_IP.shape  # noqa: E741
        A, J = setting_IA.shape[1], earlier_IJ.shape[1]
        number_J, axis_I1 = torch.arange(J), axis_I[:, None]
        later_IAJ = self.settings_JAJ[axis_I1, setting_IA]
        at_IAJ = torch.where((number_J < axis_I1)[:, None], earlier_IJ[:, None], later_IAJ)
        at_IPAJ = at_IAJ[:, None].repeat(1, P, 1, 1)
        own_IPAJ = (number_J == axis_I1)[:, None, None].expand(I, P, A, J)
        at_IPAJ[own_IPAJ] = point_IP[..., None].expand(I, P, A).flatten()
        return self.decide(_numbers(at_IPAJ.reshape(-1, J))).reshape(I, P, A)

    def all_settings(self, axis_I: Tensor) -> Tensor:
        """The indices of all settings of an axis, (I, A): only one if no number is later."""
        J, A = self.settings_JAJ.shape[:2]
        A = 1 if int(axis_I[0]) == J - 1 else A
        return torch.arange(A).expand(len(axis_I), A)


@dataclass(frozen=True)
class _Faces:
    """Faces between cells, each known to lie in an interval of its axis, lower end excluded.

    Attributes:
        axis_F: the axis.
        earlier_FJ: the earlier numbers of a point in the cell that the face cuts.
        low_F, high_F: the ends of the interval; low is below the face, high is at or above it.
        low_FA, high_FA: the outcomes there under each setting.
    """

    axis_F: Tensor
    earlier_FJ: Tensor
    low_F: Tensor
    high_F: Tensor
    low_FA: Tensor
    high_FA: Tensor


def _boxes(program: _Program, width: int) -> Boxes | None:
    """The cells. Their structure is found axis by axis, with every face known up to an interval of
    the given width; then all faces are refined together.

    None if an interval contains more than one face: then the width has to be 1.
    """
    J = program.settings_JAJ.shape[0]
    first_CJ, last_CJ = torch.zeros(1, J, dtype=torch.int64), torch.full((1, J), _ONE - 1)
    low_CJ, high_CJ = torch.zeros_like(first_CJ), torch.ones_like(first_CJ)  # indices of faces
    offsets = [torch.tensor([0, _ONE])]  # of faces 0 and 1, the ends of every axis
    num_faces, unknown = 2, []
    for axis in range(J):
        middle_CJ = (first_CJ + last_CJ) // 2
        box_F, faces = _faces(program, axis, middle_CJ, width)
        if width == 1:
            offsets.append(faces.high_F)
        else:
            unknown.append(faces)
        num_cells, F = len(first_CJ), len(box_F)
        face_F = torch.arange(num_faces, num_faces + F)
        num_faces += F
        box_C = torch.cat([torch.arange(num_cells), box_F])
        first_C = torch.cat([torch.zeros(num_cells, dtype=torch.int64), faces.high_F])
        order_C = _in_order(box_C, first_C)
        box_C, first_C = box_C[order_C], first_C[order_C]
        low_C = torch.cat([torch.zeros(num_cells, dtype=torch.int64), face_F])[order_C]
        ends_C = torch.cat([torch.zeros(num_cells, dtype=torch.int64), faces.low_F])[order_C]
        last_C, high_C = torch.full_like(low_C, _ONE - 1), torch.ones_like(low_C)
        same_C = box_C[1:] == box_C[:-1]
        last_C[:-1] = torch.where(same_C, ends_C[1:], last_C[:-1])
        high_C[:-1] = torch.where(same_C, low_C[1:], high_C[:-1])
        first_CJ, last_CJ = first_CJ[box_C], last_CJ[box_C]
        low_CJ, high_CJ = low_CJ[box_C], high_CJ[box_C]
        first_CJ[:, axis], last_CJ[:, axis] = first_C, last_C
        low_CJ[:, axis], high_CJ[:, axis] = low_C, high_C
    if unknown:
        refined_F = _refined(program, unknown)
        if refined_F is None:
            return None
        offsets.append(refined_F)
    offset = torch.cat(offsets)
    return Boxes(offset[low_CJ], offset[high_CJ])


def _faces(program: _Program, axis: int, middle_CJ: Tensor, width: int) -> tuple[Tensor, _Faces]:
    """The faces along an axis, up to a width, and the cell that each face cuts, (F,)."""
    C = len(middle_CJ)

    def outcomes(box_I: Tensor, point_IP: Tensor) -> Tensor:
        axis_I = torch.full_like(box_I, axis)
        settings_IA = program.all_settings(axis_I)
        return program.outcomes(axis_I, middle_CJ[box_I], point_IP, settings_IA)

    box_I = torch.arange(C)
    point_IP = torch.linspace(0, _ONE, _GRID + 1, dtype=torch.float64).long().repeat(C, 1)
    point_IP[:, -1] = _ONE - 1
    outcome_IPA = outcomes(box_I, point_IP)
    done: list[tuple[Tensor, ...]] = []
    while True:
        differ_IP = (outcome_IPA[:, 1:] != outcome_IPA[:, :-1]).any(-1)
        box_I = box_I[:, None].expand_as(differ_IP)[differ_IP]
        ends = (point_IP[:, :-1], point_IP[:, 1:], outcome_IPA[:, :-1], outcome_IPA[:, 1:])
        low_I, high_I, low_IA, high_IA = (each[differ_IP] for each in ends)
        narrow_I = high_I - low_I <= width
        done.append(tuple(each[narrow_I] for each in (box_I, low_I, high_I, low_IA, high_IA)))
        wide_I = ~narrow_I
        if not bool(wide_I.any()):
            break
        box_I, low_I, high_I = box_I[wide_I], low_I[wide_I], high_I[wide_I]
        point_IP = _sections(low_I, high_I, low_IA.shape[1])
        inner_IPA = outcomes(box_I, point_IP[:, 1:-1])
        outcome_IPA = torch.cat([low_IA[wide_I, None], inner_IPA, high_IA[wide_I, None]], 1)
    box_F, low_F, high_F, low_FA, high_FA = (torch.cat(each) for each in zip(*done, strict=True))
    axis_F = torch.full_like(box_F, axis)
    return box_F, _Faces(axis_F, middle_CJ[box_F], low_F, high_F, low_FA, high_FA)


def _refined(program: _Program, unknown: list[_Faces]) -> Tensor | None:
    """The exact offsets of the faces of all axes, (F,). Each face is located under one setting that
    shows it and then checked under all. None if an interval contains more than one face."""
    axis_F = torch.cat([faces.axis_F for faces in unknown])
    earlier_FJ = torch.cat([faces.earlier_FJ for faces in unknown])
    low_F = torch.cat([faces.low_F for faces in unknown])
    high_F = torch.cat([faces.high_F for faces in unknown])
    shown = [(faces.low_FA != faces.high_FA).long().argmax(1) for faces in unknown]
    setting_F1 = torch.cat(shown)[:, None]
    ends = [
        torch.stack([faces.low_FA, faces.high_FA], 1)[torch.arange(len(at_F)), :, at_F]
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
    is_last_F = axis_F == len(program.settings_JAJ) - 1
    groups = ([*unknown[:-1]], ~is_last_F), ([unknown[-1]], is_last_F)
    for group, in_F in groups:
        if bool(in_F.any()):
            settings_FA = program.all_settings(axis_F[in_F])
            found_F2A = program.outcomes(
                axis_F[in_F], earlier_FJ[in_F], beside_F2[in_F], settings_FA
            )
            wanted = [torch.stack([faces.low_FA, faces.high_FA], 1) for faces in group]
            if not torch.equal(found_F2A, torch.cat(wanted)):
                return None
    return high_F


def _in_order(first: Tensor, second: Tensor) -> Tensor:
    """The permutation that sorts pairs lexicographically."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]


def _sections(low_I: Tensor, high_I: Tensor, rows_per_point: int = 1) -> Tensor:
    """Points that divide intervals into equal sections, ends included, (I, P).

    The number of sections maximises the bits gained per unit of time, with the overhead of a call
    estimated as ``_ROWS_PER_CALL`` rows.
    """
    rows = len(low_I) * rows_per_point
    costs = {n: (_ROWS_PER_CALL + (n - 1) * rows) / math.log2(n) for n in (2, 4, 8, 16, 32)}
    num = min(costs, key=costs.__getitem__)
    return low_I[:, None] + (high_I - low_I)[:, None] * torch.arange(num + 1) // num


def _check(decide: Callable[[Tensor], Tensor], boxes: Boxes, generator: torch.Generator) -> None:
    at_BJ = torch.randint(_ONE, (_NUM_CHECKS, boxes.low_CJ.shape[1]), generator=generator)
    box_B = boxes.holding(at_BJ)
    predicted_B, outcome_B = decide(boxes.middle_CJ[box_B]), decide(_numbers(at_BJ))
    wrong = int((predicted_B != outcome_B).sum())
    assert wrong == 0, (
        f"the enumeration mispredicts {wrong} of {_NUM_CHECKS} random points: some decision is not "
        "a threshold function of its own uniform number; use chi2 for this method"
    )


def combine(parts: Tensor) -> Tensor:
    """Reduces the last dimension of an int64 tensor by a hash; equal rows have equal hashes."""
    return (parts * _weights(parts.shape[-1])).sum(-1)


@cache
def _weights(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    return 2 * torch.randint(-(1 << 62), 1 << 62, (num,), generator=generator) + 1


def _numbers(units: Tensor) -> Tensor:
    return units.double() / _ONE
