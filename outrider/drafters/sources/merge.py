"""The candidates of all sources in one tree.

The chains (or trees) stand side by side below the root. Where they agree they share a path, so a
token that several sources propose is computed and verified once. The rule then accepts the deepest
path that the target takes, whichever source proposed it. No source has to be chosen beforehand; the
price is that every source is asked in every round, the model too, and that the target's forward
pass is wider.

Siblings from different sources are not draws from one distribution, so all of them count as chosen,
the model's as well: it drafts its most likely tokens (``BEST``), at every temperature.

Reads the device up to four times per round, besides the reads of its sources: how far each draft
was right and, where two or more sources drafted something, the depth of the tree, how many nodes
are left, and whether they are a chain.

Proposes: chosen trees; a chain where all rows' sources agree.

Legend: B rows, N nodes (node 0 is the root), M nodes that differ.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Drawn, Stream
from outrider.core.errors import IncompatibleError
from outrider.drafters.chain.pick import Pick, Picker
from outrider.drafters.sources.sources import MultiSourceDrafter, Source, SourcesState


def _best(rng: Stream, num_tokens: int) -> Pick:
    return lambda q_BV, i: q_BV.argmax(-1)


BEST = Picker("chosen", _best, draws=False)
"""Takes the most likely token."""


class Merged(MultiSourceDrafter):
    """One tree per row, of all sources' candidates.

    Args:
        sources: in the order in which siblings are verified.

    Raises:
        InvalidParameterError: no sources.
        IncompatibleError: a source that draws its tokens.
    """

    drawn: Drawn = "chosen"
    drafts_trees: ClassVar[bool] = True

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__(sources, None)
        for each in sources:
            if each.drafter.drawn != "chosen":
                raise IncompatibleError(
                    f"{type(each.drafter).__name__} draws its tokens, which cannot be siblings of "
                    f"chosen ones: let it choose them (a ModelDrafter with picker=BEST)"
                )

    def propose(self, state: SourcesState, context: Context, budget: Budget, rng: Stream) -> Draft:
        state.asked = {}
        drafts = [
            self._ask(state, s, context, source.budget(budget), rng)
            for s, source in enumerate(self.sources)
        ]
        return union(drafts)


def union(drafts: Sequence[Draft]) -> Draft:
    """Chosen drafts side by side below one root; of nodes with the same path of tokens, one."""
    found = [draft for draft in drafts if draft.num_nodes > 1] or drafts[:1]
    if len(found) == 1:
        return found[0]
    root = Draft.root_only(found[0].tokens_BN[:, 0])
    tokens, parents, masks = [root.tokens_BN], [root.parents_BN], [root.mask_BN]
    above = 0
    for draft in found:
        parents_BD = draft.parents_BN[:, 1:]
        tokens.append(draft.tokens_BN[:, 1:])
        parents.append(torch.where(parents_BD > 0, parents_BD + above, 0))
        masks.append(draft.mask_BN[:, 1:])
        above += draft.num_nodes - 1
    side_by_side = Draft(
        torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(masks, 1), None, "chosen"
    )
    return without_repeats(side_by_side)


def without_repeats(draft: Draft) -> Draft:
    """The same chosen tree with one node per path of tokens, (B, M)."""
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
    """Which of the M nodes exist: a row may have fewer."""
    if index_BN is node_BM:
        return draft.mask_BN
    number_M = torch.arange(node_BM.shape[1], device=node_BM.device)
    return number_M <= index_BN.amax(1, keepdim=True)
