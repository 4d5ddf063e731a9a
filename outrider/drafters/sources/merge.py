"""Merges the candidates of all sources into one tree.

The sources' chains (or trees) hang side by side below the root. Equal paths are merged, so that a
token that several sources propose is computed and verified once. The rule then keeps the deepest
path that the target accepts, whichever source proposed it. No source has to be picked in advance;
in return every source proposes in every round, the model too, and the target's forward pass is
wider.

Siblings from different sources are not draws from one distribution, so all of them count as chosen.
The model therefore drafts its most probable tokens (``BEST``), at every temperature.

Reads the device up to four times per round, besides what its sources read: the outcomes of the
drafts; and if two or more sources have candidates, the depth of the tree, the number of distinct
nodes, and whether they form a chain.

Proposes: chosen trees; a chain where all rows' sources agree.

Legend: B rows, N nodes (node 0 is the root), M distinct nodes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Stream
from outrider.core.errors import IncompatibleError
from outrider.drafters.chain.pick import Pick, Picker
from outrider.drafters.sources.sources import MultiSourceDrafter, Source, SourcesState


def _best(rng: Stream, num_tokens: int) -> Pick:
    return lambda q_BV, i: q_BV.argmax(-1)


BEST = Picker("chosen", _best, draws=False)
"""Picks the most probable token."""


class Merged(MultiSourceDrafter):
    """Proposes one tree per row with the candidates of all sources.

    Args:
        sources: the sources, in the order in which siblings are verified.

    Raises:
        InvalidParameterError: no sources.
        IncompatibleError: a source that draws its tokens.
    """

    drawn: Drawn = "chosen"

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__(sources, None)
        for each in sources:
            if each.drafter.drawn != "chosen":
                raise IncompatibleError(
                    f"{type(each.drafter).__name__} draws its tokens, which cannot be siblings of "
                    f"chosen ones: let it choose them (a ModelDrafter with picker=BEST)"
                )

    @property
    def capabilities(self) -> Capabilities[Any]:
        return replace(
            super().capabilities,
            max_nodes=lambda num_tokens: sum(self._nodes(num_tokens)),
            drafts_trees=True,
        )

    def propose(self, state: SourcesState, context: Context, budget: Budget, rng: Stream) -> Draft:
        state.drafts = {}
        drafts = [
            self._propose(state, s, context, source.budget(budget), rng)
            for s, source in enumerate(self.sources)
        ]
        return union(drafts)


def union(drafts: Sequence[Draft]) -> Draft:
    """Chosen drafts as one, side by side below one root, without nodes of equal token paths."""
    found = [draft for draft in drafts if draft.num_nodes > 1] or drafts[:1]
    if len(found) == 1:
        return found[0]
    root = Draft.root_only(found[0].tokens_BN[:, 0])
    tokens, parents, masks = [root.tokens_BN], [root.parents_BN], [root.mask_BN]
    offset = 0
    for draft in found:
        shifted_BN = torch.where(draft.parents_BN > 0, draft.parents_BN + offset, 0)
        tokens.append(draft.tokens_BN[:, 1:])
        parents.append(shifted_BN[:, 1:])
        masks.append(draft.mask_BN[:, 1:])
        offset += draft.num_nodes - 1
    side_by_side = Draft(
        torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(masks, 1), None, "chosen"
    )
    return without_repeats(side_by_side)


def without_repeats(draft: Draft) -> Draft:
    """A chosen tree with one node per token path, (B, M)."""
    query_tokens = draft.merged_query_tokens()
    node_BM, index_BN = query_tokens.node_BQ, query_tokens.index_BN
    number_M = torch.arange(node_BM.shape[1], device=node_BM.device)
    mask_BM = _exists(draft, index_BN, node_BM)
    above_BN = index_BN.gather(1, draft.parents_BN.clamp(min=0))
    parents_BM = torch.where(mask_BM, above_BN.gather(1, node_BM), number_M - 1)
    parents_BM[:, 0] = -1
    is_chain = bool((parents_BM == number_M - 1).all())
    tokens_BM = draft.tokens_BN.gather(1, node_BM)
    return Draft(tokens_BM, parents_BM, mask_BM, None, "chosen", is_chain)


def _exists(draft: Draft, index_BN: Tensor, node_BM: Tensor) -> Tensor:
    """Which of the M distinct nodes exist in each row, (B, M)."""
    if index_BN is node_BM:
        return draft.mask_BN
    number_M = torch.arange(node_BM.shape[1], device=node_BM.device)
    return number_M <= index_BN.amax(1, keepdim=True)
