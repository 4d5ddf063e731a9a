"""What a round did to each row: as columns on the device, and as numbers once they are read.

Of a full chain the host knows most by itself, and only what it does not know becomes a column.

α, Leviathan's acceptance, is defined here once and for every method: the mean of the overlap
Σ_x min(p, q) over the positions that token-level rejection sampling verifies, whatever rule was at
work. Along the draft x_1 … x_n, cut where the sequence ends,

    r_i = min(1, p_i(x_i) / q_i(x_i)),   w_i = r_1 … r_{i-1}
    α   = Σ w_i r_i / Σ w_i,   both sums over all rounds

As x_i ~ q_i, r_i is an unbiased estimate of Σ_x min(p_i, q_i); and w_i, the probability that
rejection sampling accepts all tokens before position i, depends on those tokens alone. So neither
sum is biased by what the rule decided: block verification, say, comes to a position *because* of
the tokens behind it, and a mean over its own positions would be too high. Besides:

    a chosen token has the point mass as its q: r_i = p_i(x_i), which is Σ_x min(p, q)
    a search (beams) does not draw from q: Σ_x min(p, q) itself takes the place of r_i in the sum
    at temperature 0 both are point masses: r_i = 1 if x_i = argmax p_i, else 0
    of a tree, x_1 … x_n are the first children from the root down, which are draws as in a chain
    nothing is counted behind the end of the sequence

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Draft, Overlap, Round, Verdict, argmax


@dataclass(frozen=True)
class Counts:
    """What one round did to a row, whatever of it ends up in the text.

    Attributes:
        drafted: drafted tokens; of a tree, all its nodes.
        depth: of these, the most along one path.
        refused: whether something was drafted behind the last accepted token, and refused.
        reached: w of each position.
        overlap: w times an unbiased estimate of Σ min(p, q), of each position.
        strayed: KL(p‖π), KL(π‖p) and total variation at each drafted place, where measured.
    """

    drafted: int
    depth: int
    refused: bool
    reached: Sequence[float]
    overlap: Sequence[float]
    strayed: Sequence[tuple[float, float, float]] = ()


def count_columns(round_: Round) -> list[Tensor]:
    """The numbers to read, each (B,); how many tokens were accepted is the first."""
    columns = [round_.verdict.num_accepted_B]
    if not _is_plain(round_.draft):
        columns += [round_.draft.num_drafted_B, _depth(round_.draft), _refused(round_)]
    return columns


def read_counts(
    round_: Round,
    numbers: Sequence[float],
    overlaps: Sequence[Sequence[float]],
    strayed: Sequence[tuple[float, float, float]],
) -> Counts:
    """A row's counts, from its shares of :func:`count_columns` and :func:`overlap_of`."""
    accepted = int(numbers[0])
    if _is_plain(round_.draft):
        drafted = depth = round_.draft.num_nodes - 1
        refused = accepted < drafted
    else:
        drafted, depth, refused = int(numbers[1]), int(numbers[2]), bool(numbers[3])
    if overlaps:
        reached, overlap = overlaps
    else:
        reached, overlap = [1.0] * (accepted + refused), [1.0] * accepted
    return Counts(drafted, depth, refused, reached, overlap, strayed)


def overlap_of(round_: Round, lossless: bool) -> Overlap | None:
    """What a round says of α; None where it follows from what was accepted: of chains, where a
    lossless rule verified by the argmax."""
    draft = round_.draft
    if round_.overlap is not None:
        return round_.overlap
    if draft.num_nodes == 1 or (round_.verified_by_logits and lossless and draft.is_chain):
        return None
    if not round_.verified_by_logits:
        return overlap(draft, round_.p_BNV)
    if lossless:
        return _by_depth(draft, _accepted(draft, round_.verdict))
    parents_BD = draft.parents_BN[:, 1:].clamp(min=0)
    hits_BD = argmax(round_.p_BNV).gather(1, parents_BD) == draft.tokens_BN[:, 1:]
    return _by_depth(draft, hits_BD.to(round_.p_BNV.dtype))


def overlap(draft: Draft, p_BNV: Tensor) -> Overlap:
    """What a draft of two nodes or more says of α, verified by the target's distributions.

    min(1, p(x)/q(x)) costs two gathers where the sum over the vocabulary would cost a pass over
    both distributions. Traced by ``verified.py``.
    """
    ratio_BD = _at_tokens(draft, p_BNV)
    if draft.drawn_probs_BN is not None:
        ratio_BD = ratio_BD / draft.drawn_probs_BN[:, 1:]
    elif draft.probs_BNV is not None:
        ratio_BD = ratio_BD / _at_tokens(draft, draft.probs_BNV)
    ratio_BD = ratio_BD.clamp(max=1)
    if draft.drawn != "searched" or draft.probs_BNV is None:
        return _by_depth(draft, ratio_BD)
    common_BN = torch.minimum(p_BNV, draft.probs_BNV).sum(-1)
    return _by_depth(draft, ratio_BD, common_BN.gather(1, draft.parents_BN[:, 1:]))


def _by_depth(draft: Draft, ratio_BD: Tensor, estimate_BD: Tensor | None = None) -> Overlap:
    """From r of each drafted node, and the estimate of the overlap where that is another number."""
    if not draft.is_full:
        ratio_BD = torch.where(draft.mask_BN[:, 1:], ratio_BD, 0.0)
    if draft.is_chain:
        product_BD = ratio_BD.cumprod(1)
        reached_BD = pad(product_BD[:, :-1], (1, 0), value=1.0)
    else:
        above_BNN = draft.ancestors_BNN.tril(-1)[:, 1:, 1:]
        reached_BD = torch.where(above_BNN, ratio_BD[:, None], 1.0).prod(2)
        product_BD = reached_BD * ratio_BD
    if not draft.is_full:
        reached_BD = torch.where(_leads(draft)[:, 1:], reached_BD, 0.0)
    overlap_BD = product_BD if estimate_BD is None else reached_BD * estimate_BD
    if not draft.is_full:  # rows of nodes that do not count may hold anything
        overlap_BD = torch.where(reached_BD > 0, overlap_BD, 0.0)
    if draft.is_chain:
        return Overlap(reached_BD, overlap_BD)
    place_BD = (draft.depth_BN[:, 1:] - 1).clamp(min=0)
    zeros_BD = torch.zeros_like(reached_BD)
    return Overlap(
        zeros_BD.scatter_add(1, place_BD, reached_BD),
        zeros_BD.scatter_add(1, place_BD, overlap_BD),
    )


def _leads(draft: Draft) -> Tensor:
    """Which nodes are on the path of first children from the root down, (B, N)."""
    if draft.is_chain:
        return draft.mask_BN
    siblings_BNN = draft.parents_BN[:, :, None] == draft.parents_BN[:, None]
    later_BN = (siblings_BNN & draft.mask_BN[:, None]).tril(-1).any(2)
    return draft.mask_BN & ~(draft.ancestors_BNN & later_BN[:, None]).any(2)


def _accepted(draft: Draft, verdict: Verdict) -> Tensor:
    """1 for drafted nodes on the accepted path, else 0, (B, D)."""
    step_D = torch.arange(verdict.path_BD.shape[1], device=verdict.path_BD.device)
    on_path_BD = (step_D < verdict.num_accepted_B[:, None]).float()
    accepted_BN = torch.zeros(draft.tokens_BN.shape, device=on_path_BD.device)
    return accepted_BN.scatter_reduce(1, verdict.path_BD, on_path_BD, "amax")[:, 1:]


def _at_tokens(draft: Draft, probs_BNV: Tensor) -> Tensor:
    """What each drafted node's token has in its parent's row, (B, D)."""
    if draft.is_chain:
        return probs_BNV[:, :-1].gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
    V = probs_BNV.shape[2]
    place_BD = draft.parents_BN[:, 1:].clamp(min=0) * V + draft.tokens_BN[:, 1:]
    return probs_BNV.flatten(1).gather(1, place_BD)


def _is_plain(draft: Draft) -> bool:
    """Whether what was drafted and refused follows from what was accepted."""
    return draft.is_full and draft.drawn != "searched"


def _depth(draft: Draft) -> Tensor:
    """Drafted tokens along the longest path, shape (B,)."""
    if draft.is_chain:
        return draft.num_drafted_B
    return torch.where(draft.mask_BN, draft.depth_BN, 0).amax(1)


def _refused(round_: Round) -> Tensor:
    """Whether something was drafted behind the last accepted token and refused, shape (B,).

    A token that a search found and that is emitted all the same was not.
    """
    draft, verdict = round_.draft, round_.verdict
    num_accepted_B = verdict.num_accepted_B
    if draft.is_chain and draft.drawn != "searched":
        return num_accepted_B < draft.num_drafted_B
    if draft.is_chain:
        last_B = num_accepted_B
    else:
        path_BN = pad(verdict.path_BD, (1, 0))
        last_B = path_BN.gather(1, num_accepted_B[:, None])[:, 0]
    child_BN = draft.mask_BN & (draft.parents_BN == last_B[:, None])
    if draft.drawn == "searched":
        child_BN = child_BN & (draft.tokens_BN != verdict.next_token_B[:, None])
    return child_BN.any(1)
