"""The solution of ``clamp.py`` for large vocabularies, without sorting them.

Only the tokens whose ratio w = p/q is near α or near β have to be known one by one; of all others
the masses do. So tokens are counted into bins by the upper bits of w as a float32 number, which
order as w does; the binned distributions say in which two cells of bins α and β lie; and the path
is then solved exactly over the tokens of those cells, with the rest as three groups:

    all below α | tokens around α | all between | tokens around β | all above β

The one thing that the bins round off is the divergence of the tokens between, Σ d(p, q). Merging
tokens whose ratios agree to δ loses less than δ²/4 of their mass, and never adds; a row where that
could matter at the millionth of the budget, where α or β turn out to lie elsewhere, or where a
distribution has zeros, is left to the sort. :func:`zoom` says which rows it has solved.

Legend: R rows, V vocabulary, K bins, C cells of bins, Z tokens that are looked at one by one.
"""

import torch
from torch import Tensor

from outrider.core import Divergence
from outrider.verifiers.clamp import Clamp, Path, mass_divergence

_DROPPED_BITS = 12  # of the mantissa's 23: bins are 2^-11 wide, relatively
_BINS_PER_CELL = 8
_NUM_BINS = 8 << 11  # eight octaves, 1/16 … 16; the outermost bins take what lies beyond
_FIRST = (127 - 4) << 11


def zoom(divergence: Divergence, p_RV: Tensor, q_RV: Tensor, budget: float) -> tuple[Clamp, Tensor]:
    """The solution at this budget, and in which rows it is exact."""
    R = p_RV.shape[0]
    C = _NUM_BINS // _BINS_PER_CELL
    bits_RV = (p_RV / q_RV).float().view(torch.int32)
    bin_RV = bits_RV.bitwise_right_shift_(_DROPPED_BITS).sub_(_FIRST).clamp_(0, _NUM_BINS - 1)
    index_RV = bin_RV.long()
    p_RV, q_RV = p_RV.double(), q_RV.double()
    table_2RK = p_RV.new_zeros(2, R, _NUM_BINS)
    for x_RV, table_RK in zip((p_RV, q_RV), table_2RK, strict=True):
        table_RK.scatter_add_(1, index_RV, x_RV)
    total_2R1 = table_2RK.sum(2, keepdim=True)
    table_2RK /= total_2R1
    d_RK = mass_divergence(divergence, *table_2RK)
    d_RK = torch.where(table_2RK[1] > 0, d_RK, 0.0)
    cells_3RC = torch.cat([table_2RK, d_RK[None]]).view(3, R, C, _BINS_PER_CELL).sum(3)

    # An empty cell gets its place in the order by masses that vanish beside any other.
    number_C = torch.arange(C, device=p_RV.device, dtype=torch.int32) * _BINS_PER_CELL + _FIRST
    ratio_C = (number_C << _DROPPED_BITS).view(torch.float32).double()
    cells_3RC[0] += 1e-30 * ratio_C
    cells_3RC[1] += 1e-30

    # Which cells: the last that has joined and the first that has not, on either side.
    cells = Path(divergence, cells_3RC[0], cells_3RC[1], cells_3RC[2], False)
    rho_R1 = cells.exact(budget, close=1e-3)
    A_R1, B_R1 = cells.sizes(rho_R1)
    first_A_R1, first_B_R1 = (A_R1 - 1).clamp(0, C - 2), (C - 1 - B_R1).clamp(0, C - 2)
    sums_3RC = cells.sums_23RG[0]
    below_3R1, to_A_3R1, to_B_3R1, to_end_3R1 = (
        sums_3RC.gather(2, at_R1.expand(3, R, 1))
        for at_R1 in (first_A_R1, first_A_R1 + 2, first_B_R1, first_B_R1 + 2)
    )
    between_3R1 = to_B_3R1 - to_A_3R1

    # The tokens of those cells.
    width = (2 * _BINS_PER_CELL).bit_length() - 1
    from_A_RV, from_B_RV = (
        (bin_RV - (_BINS_PER_CELL * first_R1).int()).bitwise_right_shift_(width)
        for first_R1 in (first_A_R1, first_B_R1)
    )
    row_Z, column_Z = (from_A_RV.mul_(from_B_RV) == 0).nonzero(as_tuple=True)
    count_R = row_Z.bincount(minlength=R)
    slot_Z = torch.arange(len(row_Z), device=row_Z.device) - (count_R.cumsum(0) - count_R)[row_Z]
    near_2RZ = p_RV.new_zeros(2, R, int(count_R.max()))
    for x_RV, near_RZ in zip((p_RV, q_RV), near_2RZ, strict=True):
        near_RZ[row_Z, slot_Z] = x_RV[row_Z, column_Z]
    near_2RZ /= total_2R1

    # The exact path. The groups below and above are clamped for certain, so their d is not used.
    groups_3R3 = torch.cat([below_3R1, between_3R1, sums_3RC[:, :, -1:] - to_end_3R1], 2)
    P_RG, Q_RG = torch.cat([groups_3R3[:2], near_2RZ], 2)
    d_RG = torch.cat([groups_3R3[2], mass_divergence(divergence, *near_2RZ)], 1)
    order_RG = torch.where(Q_RG > 0, P_RG / Q_RG, torch.inf).argsort(1)
    P_RG, Q_RG, d_RG = (x_RG.gather(1, order_RG) for x_RG in (P_RG, Q_RG, d_RG))
    path = Path(divergence, P_RG, Q_RG, d_RG, False)
    found = path.clamp(path.exact(budget, rho_R1))

    inside_R = _inside(found.alpha_R, first_A_R1[:, 0]) & _inside(1 / found.b_R, first_B_R1[:, 0])
    P_R, Q_R, d_R = between_3R1[..., 0]
    lost_R = 2.0**-25 * {"kl": P_R, "rkl": Q_R, "tv": 0 * P_R, "chi2": 2 * (P_R + d_R)}[divergence]
    certain_R = (first_A_R1 + 2 <= first_B_R1)[:, 0] & (lost_R <= 5e-7 * budget)
    positive_R = (p_RV.amin(1) > 0) & (q_RV.amin(1) > 0)
    exact_R = inside_R & certain_R & positive_R & (found.alpha_R > 0)

    # Rows that seem to accept everything: the merged groups may hide a little divergence.
    row_W = (positive_R & (found.alpha_R == 0)).nonzero()[:, 0]
    if len(row_W):
        P_WV, Q_WV = p_RV[row_W] / total_2R1[0, row_W], q_RV[row_W] / total_2R1[1, row_W]
        exact_R[row_W] = mass_divergence(divergence, P_WV, Q_WV).sum(1) <= budget
    return found, exact_R


def _inside(ratio_R: Tensor, first_R: Tensor) -> Tensor:
    """Whether a ratio lies in the two cells from ``first`` on."""
    cell_R = ratio_R.float().view(torch.int32).bitwise_right_shift(_DROPPED_BITS) - _FIRST
    cell_R = cell_R.clamp(0, _NUM_BINS - 1) // _BINS_PER_CELL
    return (cell_R == first_R) | (cell_R == first_R + 1)
