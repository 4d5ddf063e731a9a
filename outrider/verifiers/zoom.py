"""Solves the problem of ``clamp.py`` for large vocabularies without sorting them.

Only tokens whose ratio w = p/q is close to α or β have to be considered individually; for all
others it is enough to know their total masses. Tokens are therefore binned by the upper bits of w
as a float32 number, which are ordered as w is. The binned distributions determine the cells (groups
of bins) in which α and β lie, and the path is then solved exactly over the tokens of those cells,
with all other tokens merged into three groups:

    all below α | tokens around α | all between | tokens around β | all above β

The only quantity that binning approximates is Σ d(p, q) over the tokens between α and β. Merging
tokens whose ratios agree within δ reduces it by less than δ²/4 of their mass and never increases
it. Some rows are left to the sort: those where this error could exceed a millionth of the budget,
where α or β turns out to lie in another cell, or where a distribution has zeros. :func:`zoom`
reports which rows it has solved.

Legend: R rows to solve, V vocabulary, I intervals of w (the bins), C cells of bins, Z tokens
selected for individual treatment, G groups of tokens in ascending order of p/q, U rows that need a
final check.
"""

import torch
from torch import Tensor

from outrider.core import Divergence, rows_of
from outrider.verifiers.clamp import Clamp, ClampPath, mass_divergence

_DROPPED_BITS = 12  # of the 23 of the mantissa: bins have a relative width of 2^-11
_BINS_PER_CELL = 8
_NUM_BINS = 8 << 11  # eight octaves, 1/16 … 16; the first and last bins include all beyond
_FIRST_BIN = (127 - 4) << 11


def zoom(divergence: Divergence, p_RV: Tensor, q_RV: Tensor, budget: float) -> tuple[Clamp, Tensor]:
    """The solution at this budget, and which rows it is exact for, (R,)."""
    R = p_RV.shape[0]
    C = _NUM_BINS // _BINS_PER_CELL
    bits_RV = (p_RV / q_RV).float().view(torch.int32)
    bin_RV = bits_RV.bitwise_right_shift_(_DROPPED_BITS).sub_(_FIRST_BIN).clamp_(0, _NUM_BINS - 1)
    index_RV = bin_RV.long()
    p_RV, q_RV = p_RV.double(), q_RV.double()
    table_2RI = p_RV.new_zeros(2, R, _NUM_BINS)
    for x_RV, table_RI in zip((p_RV, q_RV), table_2RI, strict=True):
        table_RI.scatter_add_(1, index_RV, x_RV)
    total_2R1 = table_2RI.sum(2, keepdim=True)
    table_2RI /= total_2R1
    d_RI = mass_divergence(divergence, *table_2RI)
    d_RI = torch.where(table_2RI[1] > 0, d_RI, 0.0)
    cells_3RC = torch.cat([table_2RI, d_RI[None]]).view(3, R, C, _BINS_PER_CELL).sum(3)

    # Negligible masses, in the ratio of the cell, keep empty cells in ascending order of p/q.
    number_C = torch.arange(C, device=p_RV.device, dtype=torch.int32) * _BINS_PER_CELL + _FIRST_BIN
    ratio_C = (number_C << _DROPPED_BITS).view(torch.float32).double()
    cells_3RC[0] += 1e-30 * ratio_C
    cells_3RC[1] += 1e-30

    # On either side, select the last cell that has joined A or B and the first that has not.
    cells = ClampPath(divergence, cells_3RC[0], cells_3RC[1], cells_3RC[2], False)
    rho_R1 = cells.exact(budget, tolerance=1e-3)
    A_R1, B_R1 = cells.sizes(rho_R1)
    first_A_R1, first_B_R1 = (A_R1 - 1).clamp(0, C - 2), (C - 1 - B_R1).clamp(0, C - 2)
    sums_3RC = cells.sums_23RG[0]
    below_3R1, to_A_3R1, to_B_3R1, to_end_3R1 = (
        sums_3RC.gather(2, at_R1.expand(3, R, 1))
        for at_R1 in (first_A_R1, first_A_R1 + 2, first_B_R1, first_B_R1 + 2)
    )
    between_3R1 = to_B_3R1 - to_A_3R1

    # Collect the tokens of the selected cells.
    width = (2 * _BINS_PER_CELL).bit_length() - 1
    from_A_RV, from_B_RV = (
        (bin_RV - (_BINS_PER_CELL * first_R1).int()).bitwise_right_shift_(width)
        for first_R1 in (first_A_R1, first_B_R1)
    )
    is_near_RV = from_A_RV.mul_(from_B_RV) == 0
    row_Z, token_Z = is_near_RV.nonzero(as_tuple=True)
    count_R = is_near_RV.sum(1)
    first_R = count_R.cumsum(0) - count_R
    slot_Z = torch.arange(row_Z.shape[0], device=row_Z.device) - first_R[row_Z]
    near_2RZ = p_RV.new_zeros(2, R, count_R.max().item())
    for x_RV, near_RZ in zip((p_RV, q_RV), near_2RZ, strict=True):
        near_RZ[row_Z, slot_Z] = x_RV[row_Z, token_Z]
    near_2RZ /= total_2R1

    # Solve exactly. The groups below and above are always clamped, so their d is not used.
    groups_3R3 = torch.cat([below_3R1, between_3R1, sums_3RC[:, :, -1:] - to_end_3R1], 2)
    P_RG, Q_RG = torch.cat([groups_3R3[:2], near_2RZ], 2)
    d_RG = torch.cat([groups_3R3[2], mass_divergence(divergence, *near_2RZ)], 1)
    order_RG = torch.where(Q_RG > 0, P_RG / Q_RG, torch.inf).argsort(1)
    P_RG, Q_RG, d_RG = (x_RG.gather(1, order_RG) for x_RG in (P_RG, Q_RG, d_RG))
    path = ClampPath(divergence, P_RG, Q_RG, d_RG, False)
    clamp = path.clamp(path.exact(budget, rho_R1))

    inside_R = _inside(clamp.alpha_R, first_A_R1[:, 0]) & _inside(1 / clamp.b_R, first_B_R1[:, 0])
    P_R, Q_R, d_R = between_3R1[..., 0]
    lost_R = 2.0**-25 * {"kl": P_R, "rkl": Q_R, "tv": 0 * P_R, "chi2": 2 * (P_R + d_R)}[divergence]
    precise_R = (first_A_R1 + 2 <= first_B_R1)[:, 0] & (lost_R <= 5e-7 * budget)
    positive_R = (p_RV.amin(1) > 0) & (q_RV.amin(1) > 0)
    exact_R = inside_R & precise_R & positive_R & (clamp.alpha_R > 0)

    # Check rows that seem to accept everything: merging may have hidden a little divergence.
    whole_R = positive_R & (clamp.alpha_R == 0)
    row_U = rows_of(whole_R)
    P_UV, Q_UV = p_RV[row_U] / total_2R1[0, row_U], q_RV[row_U] / total_2R1[1, row_U]
    within_U = mass_divergence(divergence, P_UV, Q_UV).sum(1) <= budget
    return clamp, exact_R | (whole_R.index_copy(0, row_U, within_U) & whole_R)


def _inside(ratio_R: Tensor, first_R: Tensor) -> Tensor:
    """Whether a ratio lies in cell ``first`` or the next one."""
    cell_R = ratio_R.float().view(torch.int32).bitwise_right_shift(_DROPPED_BITS) - _FIRST_BIN
    cell_R = cell_R.clamp(0, _NUM_BINS - 1) // _BINS_PER_CELL
    return (cell_R == first_R) | (cell_R == first_R + 1)
