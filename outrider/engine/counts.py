"""What a round did to each row: as columns on the device, and as numbers once they are read.

Of a full chain the host knows most by itself, and only what it does not know becomes a column.

Legend: B rows, N nodes, D drafted tokens of a chain (N-1), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import Draft, Round, Verdict, counting


@dataclass(frozen=True)
class Counts:
    """What one round did to a row, whatever of it ends up in the text.

    Attributes:
        drafted: drafted tokens; of a tree, all its nodes.
        depth: of these, the most along one path.
        refused: whether something was drafted behind the last accepted token, and refused.
        overlap: an unbiased estimate of the sum of Σ min(p, q) over the verified positions.
        strayed: KL(p‖π), KL(π‖p) and total variation at each drafted place, where measured.
    """

    drafted: int
    depth: int
    refused: bool
    overlap: float
    strayed: Sequence[tuple[float, float, float]] = ()


def count_columns(turn: Round) -> list[Tensor]:
    """The numbers to read, each (B,); how many tokens were accepted is the first."""
    columns = [turn.verdict.num_accepted_B]
    if not _is_plain(turn.draft):
        columns += [turn.draft.num_drafted_B, _depth(turn.draft), _refused(turn)]
    if not _overlap_is_accepted(turn):
        overlap_B = turn.overlap_B
        if overlap_B is None:
            overlap_B = overlap(turn.draft, turn.p_BNV, turn.verdict)
        columns.append(overlap_B)
    return columns


def read_counts(
    turn: Round, numbers: Sequence[float], strayed: Sequence[tuple[float, float, float]]
) -> Counts:
    """A row's counts, from its share of :func:`count_columns`."""
    accepted = numbers[0]
    overlap = accepted if _overlap_is_accepted(turn) else numbers[-1]
    if _is_plain(turn.draft):
        drafted = turn.draft.num_nodes - 1
        return Counts(drafted, drafted, accepted < drafted, float(overlap), strayed)
    counted = [int(number) for number in numbers[1:4]]
    return Counts(counted[0], counted[1], bool(counted[2]), float(overlap), strayed)


def _is_plain(draft: Draft) -> bool:
    """Whether what was drafted and refused follows from what was accepted."""
    return draft.is_full and draft.drawn != "searched"


def _overlap_is_accepted(turn: Round) -> bool:
    """Where no laws were computed (greedy), and for trees, the overlap is taken as 1 for accepted
    tokens and 0 where all were refused."""
    return turn.judged_by_logits or not turn.draft.is_chain or turn.draft.num_nodes == 1


def _depth(draft: Draft) -> Tensor:
    """Drafted tokens along the longest path, shape (B,)."""
    if draft.is_chain:
        return draft.num_drafted_B
    return torch.where(draft.mask_BN, draft.depth_BN, 0).amax(1)


def _refused(turn: Round) -> Tensor:
    """Whether something was drafted behind the last accepted token and refused, shape (B,).

    A token that a search found and that is emitted all the same was not.
    """
    draft, verdict = turn.draft, turn.verdict
    num_accepted_B = verdict.num_accepted_B
    if draft.is_chain and draft.drawn != "searched":
        return num_accepted_B < draft.num_drafted_B
    if draft.is_chain:
        last_B = num_accepted_B
    else:
        path_BN = torch.nn.functional.pad(verdict.path_BD, (1, 0))
        last_B = path_BN.gather(1, num_accepted_B[:, None])[:, 0]
    child_BN = draft.mask_BN & (draft.parents_BN == last_B[:, None])
    if draft.drawn == "searched":
        child_BN = child_BN & (draft.tokens_BN != verdict.next_token_B[:, None])
    return child_BN.any(1)


def overlap(draft: Draft, p_BNV: Tensor, verdict: Verdict) -> Tensor:
    """Sum over a chain's verified places of an unbiased estimate of Σ min(p, q), shape (B,).

    min(1, p(x)/q(x)) at the drafted token has that mean under x ~ q. It costs two gathers where
    the sum over the vocabulary would cost a pass over both laws.
    """
    x_BD1 = draft.tokens_BN[:, 1:, None]
    ratio_BD = p_BNV[:, :-1].gather(2, x_BD1)[..., 0]
    if draft.probs_BNV is not None:
        ratio_BD = (ratio_BD / draft.probs_BNV[:, :-1].gather(2, x_BD1)[..., 0]).clamp(max=1)
    depth_D = counting(draft.num_nodes - 1, ratio_BD.device)
    verified_BD = depth_D <= verdict.num_accepted_B[:, None]
    if not draft.is_full:
        verified_BD = verified_BD & draft.mask_BN[:, 1:]
    return torch.where(verified_BD, ratio_BD, 0.0).sum(1)
