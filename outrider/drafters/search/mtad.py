"""A smaller model drafts by beam search, and drafts all beams of all steps: MTAD's tree.

Qin, He, Hu, Prakriya, Cong and Sun, "Optimized Multi-Token Joint Decoding with Auxiliary Model for
LLM Inference", ICLR 2025, in the multi-candidate form of the authors' code. The search is that of
``BeamDrafter``; its tree, dead beams included, becomes the draft:

    level i:   the beams that step i kept, best first, each below the beam that it continues

Siblings differ, and every node's q is the draft model's distribution after its parent. At
temperature 0 the draft is the argmax chain.

Legend: B rows, n beams of a step, N nodes of the draft, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, get_args

import torch
from torch.nn.functional import pad

from outrider.core import Budget, Capabilities, Context, Draft
from outrider.core.capabilities import TreeShape
from outrider.core.errors import InvalidParameterError
from outrider.drafters.search.beam import BeamDrafter, Step
from outrider.runtime import HFModel

Search = Literal["sample", "greedy"]
_MOST_NODES = 255  # without the root: the slots that a cache has after a full context


class MtadDrafter(BeamDrafter):
    """Drafts the tree of a beam search, under the same sampling parameters as the target.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
        beams: B, 1 or more.
        search: ``sample`` or ``greedy``, as for ``BeamDrafter``; ``copies`` would give equal
            siblings.
        depth: γ, the most steps of a search.
        fused: whether one compiled program runs the searches of γ steps.

    Raises:
        InvalidParameterError: as ``BeamDrafter``, or more than 255 beams in all steps together.
    """

    DEPTH: ClassVar[int] = 5

    def __init__(
        self,
        model: HFModel,
        num_tokens: int,
        beams: int = 4,
        search: Search = "sample",
        depth: int = DEPTH,
        *,
        fused: bool = False,
    ) -> None:
        if search not in get_args(Search):
            raise InvalidParameterError(f"search={search!r}: must be one of {get_args(Search)}")
        super().__init__(model, num_tokens, beams, search, num_fused=depth if fused else 0)
        if beams * depth > _MOST_NODES:
            raise InvalidParameterError(
                f"beams={beams}: {depth} steps of {beams} beams are {beams * depth} nodes, and at "
                f"most {_MOST_NODES} fit into one pass: take {_MOST_NODES // depth} beams or fewer"
            )
        self.depth = depth

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        own, num_drafted = super().capabilities, self.depth * self.beams
        return replace(
            own,
            depth=self.depth,
            drafts_trees=True,
            tree_shape=TreeShape(num_drafted + 1, num_drafted) if own.fused_tree else None,
        )

    def _draft(self, steps: Sequence[Step], context: Context, budget: Budget) -> Draft:
        """The tree of all beams, level by level."""
        tokens_BN = torch.cat([context.root_B[:, None], steps[-1].tree.tokens_BM], 1)
        mask = [torch.ones_like(tokens_BN[:, :1], dtype=torch.bool)]
        parents = [torch.full_like(tokens_BN[:, :1], -1)]
        for depth, step in enumerate(steps):
            exists_Bn = step.score_Bn > -torch.inf
            if budget.tokens_B is not None:
                exists_Bn = exists_Bn & (budget.tokens_B > depth)[:, None]
            mask.append(exists_Bn)
            path_BnK = pad(step.tree.path_BnK + 1, (1, 0))  # node 0 is the root
            parents.append(path_BnK[:, :, -2])
        none_BnV = torch.zeros_like(steps[-1].q_BnV[:, :1])
        leaves_BnV = none_BnV.expand(-1, steps[-1].score_Bn.shape[1], -1)
        probs_BNV = torch.cat([*(step.q_BnV for step in steps), leaves_BnV], 1)
        is_chain = tokens_BN.shape[1] == len(steps) + 1
        mask_BN, parents_BN = torch.cat(mask, 1), torch.cat(parents, 1)
        return Draft(tokens_BN, parents_BN, mask_BN, probs_BNV, "searched", is_chain)
