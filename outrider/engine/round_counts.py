"""What a round did to each row: counts on the device, and on the host once they are copied.

All numbers of a round are copied to the host together, its one device-to-host synchronisation. Most
counts of a full chain follow from its size; only the others are copied.

α, Leviathan's acceptance, is defined here once and for every method: the mean of the overlap
Σ_x min(p, q) over the positions that token-level rejection sampling verifies, whatever rule was at
work. Along the draft x_1 … x_n, cut where the sequence ends,

    r_i = min(1, p_i(x_i) / q_i(x_i)),   w_i = r_1 … r_{i-1}
    α   = Σ w_i r_i / Σ w_i,   both sums over all rounds

As x_i ~ q_i, r_i is an unbiased estimate of Σ_x min(p_i, q_i); and w_i, the probability that
rejection sampling accepts all tokens before position i, depends on those tokens alone. So neither
sum is biased by what the rule decided: block verification, for example, comes to a position
*because* of the tokens after it, and a mean over its own positions would be too high. Besides:

    a chosen token has the point mass as its q: r_i = p_i(x_i), which is Σ_x min(p, q)
    a search (beams) does not draw from q: Σ_x min(p, q) itself takes the place of r_i in the sum
    at temperature 0 both are point masses: r_i = 1 if x_i = argmax p_i, else 0
    of a tree, x_1 … x_n are the first children from the root down, which are draws as in a chain
    nothing is counted after the end of the sequence

Legend: B rows, N nodes, D drafted tokens (N-1), C columns of a block.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core import Draft, Overlap, Round, argmax
from outrider.core.counts import DraftCounts
from outrider.core.overlap import accepted_nodes, estimated_overlap, overlap_by_depth

Line = list[list[float]]
"""A row's numbers, block by block."""


class RoundCounts(NamedTuple):
    """What one round did to a row, wherever the output then ends.

    Attributes:
        drafted: drafted tokens; of a tree, all its nodes.
        depth: of these, the most along one path.
        rejected: whether the first drafted token after the accepted ones was rejected.
        reached: w of each position.
        overlap: w times an unbiased estimate of Σ min(p, q), of each position.
        divergences: KL(p‖π), KL(π‖p) and total variation at each drafted position, if measured.
        forced: drafted tokens, the first ones, that a grammar forced.
    """

    drafted: int
    depth: int
    rejected: bool
    reached: Sequence[float]
    overlap: Sequence[float]
    divergences: Sequence[tuple[float, float, float]] = ()
    forced: int = 0


def count_columns(round_: Round) -> list[Tensor]:
    """The counts to copy to the host, each (B,); the number of accepted tokens is the first."""
    columns = [round_.verdict.num_accepted_B]
    if not _is_plain(round_.draft):
        columns += round_.counts or DraftCounts.of(round_.draft, round_.verdict)
    return columns


def copy_to_host(blocks: Sequence[Tensor]) -> list[Line]:
    """The numbers of each row.

    On a CPU each block is copied by itself. Elsewhere the blocks become one table first, since
    every copy waits for the device.

    Args:
        blocks: columns (B,), or several side by side (B, C); of any dtypes.
    """
    if blocks[0].device.type == "cpu":
        lists = [block.tolist() for block in blocks]
        columns = [block.dim() == 1 for block in blocks]
        return [
            [[part] if one else part for part, one in zip(line, columns, strict=True)]
            for line in zip(*lists, strict=True)
        ]
    blocks = [block if block.dim() == 2 else block[:, None] for block in blocks]
    dtype = torch.float32 if blocks[0].device.type == "mps" else torch.float64
    table = torch.cat([block.to(dtype) for block in blocks], 1).tolist()
    ends = list(accumulate((block.shape[1] for block in blocks), initial=0))
    return [[line[a:b] for a, b in pairwise(ends)] for line in table]


def read_counts(
    round_: Round,
    numbers: Sequence[float],
    overlaps: Sequence[Sequence[float]],
    divergences: Sequence[tuple[float, float, float]],
    forced: int = 0,
) -> RoundCounts:
    """A row's counts, from its numbers of :func:`count_columns` and :func:`overlap_of`, and the
    number of forced tokens in its draft."""
    accepted = int(numbers[0])
    if _is_plain(round_.draft):
        drafted = depth = round_.draft.num_nodes - 1
        rejected = accepted < drafted
    else:
        drafted, depth, rejected = int(numbers[1]), int(numbers[2]), bool(numbers[3])
    if overlaps:
        reached, overlap = overlaps
    else:
        reached, overlap = [1.0] * (accepted + rejected), [1.0] * accepted
    return RoundCounts(drafted, depth, rejected, reached, overlap, divergences, forced)


def overlap_of(round_: Round, lossless: bool) -> Overlap | None:
    """A round's contribution to α; None where it follows from what was accepted: for chains that a
    lossless rule verified by the argmax."""
    draft = round_.draft
    if round_.overlap is not None:
        return round_.overlap
    if draft.num_nodes == 1 or (round_.verified_by_logits and lossless and draft.is_chain):
        return None
    if not round_.verified_by_logits:
        return estimated_overlap(draft, round_.p_BNV)
    if lossless:
        return overlap_by_depth(draft, accepted_nodes(draft, round_.verdict))
    parents_BD = draft.parents_BN[:, 1:].clamp(min=0)
    hits_BD = argmax(round_.p_BNV).gather(1, parents_BD) == draft.tokens_BN[:, 1:]
    return overlap_by_depth(draft, hits_BD.to(round_.p_BNV.dtype))


def _is_plain(draft: Draft) -> bool:
    """Whether the drafted and rejected tokens follow from the accepted ones."""
    return draft.is_full and draft.drawn != "searched"
