"""Verdicts of deterministic rules: each candidate is either acceptable given its parent or not.

Legend: B rows, N nodes, D drafted tokens (N-1).
"""

import torch
from torch import Tensor

from outrider.core.chain import chain_tensors_like
from outrider.core.draft import Draft, Verdict
from outrider.core.walk import path_to


def match(draft: Draft, fits_BD: Tensor, next_BN: Tensor) -> Verdict:
    """Accepts the deepest path all of whose candidates are acceptable (the first of equals).

    Args:
        draft: chains or trees.
        fits_BD: whether node i+1 is acceptable given its parent.
        next_BN: the token to emit if the accepted path ends at that node.
    """
    if not draft.is_full:
        fits_BD = fits_BD & draft.mask_BN[:, 1:]
    if draft.is_chain:
        path_BD = chain_tensors_like(draft.tokens_BN).path_BD
        node_B = fits_BD.cumprod(1).sum(1)
        return Verdict(path_BD, node_B, next_BN.gather(1, node_B[:, None])[:, 0])
    node_B = _deepest(draft, fits_BD)
    num_accepted_B = draft.depth_BN.gather(1, node_B[:, None])[:, 0]
    return Verdict(path_to(draft, node_B), num_accepted_B, next_BN.gather(1, node_B[:, None])[:, 0])


def match_picks(draft: Draft, pick_BN: Tensor) -> Verdict:
    """Accepts the deepest path whose tokens equal the tokens picked at their parents.

    Args:
        draft: chains or trees.
        pick_BN: the token picked at each node; the next token where a path ends there.
    """
    if draft.num_nodes == 1:
        none = chain_tensors_like(draft.tokens_BN)
        return Verdict(none.path_BD, none.num_drafted_B, pick_BN[:, 0])
    return match(draft, candidates_equal(draft, pick_BN), pick_BN)


def candidates_equal(draft: Draft, pick_BN: Tensor) -> Tensor:
    """Whether each drafted token equals the token picked at its parent, shape (B, D)."""
    if draft.is_chain:
        return pick_BN[:, :-1] == draft.tokens_BN[:, 1:]
    return pick_BN.gather(1, draft.parents_BN[:, 1:]) == draft.tokens_BN[:, 1:]


def _deepest(draft: Draft, fits_BD: Tensor) -> Tensor:
    """The deepest node acceptable with all its ancestors (the first of equals), shape (B,)."""
    fits_BN = torch.nn.functional.pad(fits_BD, (1, 0), value=True)
    reached_BN = (fits_BN[:, None, :] | ~draft.ancestors_BNN).all(2)
    return torch.where(reached_BN, draft.depth_BN, -1).argmax(1)
