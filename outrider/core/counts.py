"""What the statistics count of a verified draft, besides the accepted tokens.

Fused verification compiles :meth:`DraftCounts.of` for trees, where it takes a dozen small
operations.

Legend: B rows, N nodes, D depth.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core.draft import Draft, Verdict
from outrider.core.reductions import any_of


class DraftCounts(NamedTuple):
    """Counts of each row, (B,).

    Attributes:
        num_drafted_B: drafted tokens.
        depth_B: of these, the most along one path.
        rejected_B: whether a token was drafted after the last accepted one and rejected. A token
            that a search found and that is emitted all the same was not rejected.
    """

    num_drafted_B: Tensor
    depth_B: Tensor
    rejected_B: Tensor

    @classmethod
    def of(cls, draft: Draft, verdict: Verdict) -> "DraftCounts":
        """Those of a draft and what was decided about it."""
        return cls(draft.num_drafted_B, _depth(draft), _rejected(draft, verdict))


def _depth(draft: Draft) -> Tensor:
    if draft.is_chain:
        return draft.num_drafted_B
    return torch.where(draft.mask_BN, draft.depth_BN, 0).amax(1)


def _rejected(draft: Draft, verdict: Verdict) -> Tensor:
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
    return any_of(child_BN)
