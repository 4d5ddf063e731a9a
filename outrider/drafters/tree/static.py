"""A draft model grows a token tree of fixed shape, one pass per level.

Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
Inference and Verification", ASPLOS 2024, section 3 (i.i.d. children); Yang et al., "Multi-Candidate
Speculative Decoding", 2024, and Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware
Speculative Decoding", 2024, section 3 (draws without replacement); Cai et al., "Medusa", ICML 2024,
section 2.1 (the best tokens by rank).

    children of node v  ~  q( . | context, path to v)

A forward pass takes the nodes of a level that have children, under a tree mask, after those of the
levels above; the last level needs no pass. After a round the draft model's cache forgets all nodes.
The next round's first pass takes the accepted path along with the new root, which costs no more
than a pass over one token while reading the weights dominates. So nothing is ever moved within the
cache.

How a level's children are drawn, and what a budget cuts, is in ``grow.py``. Where the model is
compiled, a tree of all levels is one program (``fused.py``), unless there are processors or forced
tokens, or the best tokens by rank are to be those of changed logits.

Legend: B rows, N nodes (node 0 is the root), V vocabulary, n nodes of a level that have children.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Stream
from outrider.core.capabilities import TreeShape
from outrider.drafters.chain.model import ModelBacked, ModelState
from outrider.drafters.tree.fused import TreePlan, tree_plan
from outrider.drafters.tree.grow import Children, Level, StaticTree
from outrider.drafters.tree.topology import Topology
from outrider.runtime import HFModel
from outrider.sampling import Warp


class TreeDrafter(ModelBacked):
    """Drafts a tree of fixed shape, under the same sampling parameters as the target.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
        topology: the shape; budgets cut it at their depth.
        children: ``iid`` draws; ``distinct``, draws without replacement; or ``chosen``, the best
            tokens by rank, for which no distributions are computed.

    Raises:
        InvalidParameterError: any other kind of children.
    """

    def __init__(
        self, model: HFModel, num_tokens: int, topology: Topology, children: Children = "iid"
    ) -> None:
        super().__init__(model, num_tokens)
        self._tree = StaticTree(topology, children, num_tokens, model.device)
        self._plan = self._plan_of(self._tree)
        self._depth_N = torch.tensor(topology.depths, device=model.device)

    def _plan_of(self, tree: StaticTree) -> TreePlan:
        """What the compiled program drafts."""
        return tree_plan(tree)

    @property
    def topology(self) -> Topology:
        return self._tree.topology

    @property
    def drawn(self) -> Drawn:
        return self._tree.drawn

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        tree = self.topology
        shape = TreeShape(tree.num_nodes, max(tree.walk_steps), tree.parents)
        return replace(
            super().capabilities,
            depth=tree.depth,
            max_nodes=lambda num_tokens: tree.num_nodes + 1,
            drafts_trees=not tree.is_chain,
            tree_shape=None if tree.is_chain else shape,
            runs_trees=True,
            fused_tree=self._plan if self.model.num_tokens == self.num_tokens else None,
        )

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        if self._fits(context, budget) and self._can_align(state, context):
            draft = self._fused(state, context, budget, rng)
            if draft is not None:
                return draft
        return self._tree.grow(context, budget, rng, partial(self._logits, state, context))

    def _fits(self, context: Context, budget: Budget) -> bool:
        """Whether the compiled program can grow this tree."""
        distribution = context.distribution
        return (
            self._has_programs
            and budget.max_tokens >= self.topology.depth
            and isinstance(distribution, Warp)
            and (distribution.keeps_logits if self._picks(context) else distribution.fuses)
        )

    def _picks(self, context: Context) -> bool:
        """Whether children are the best tokens by rank."""
        return context.distribution.greedy or not self._plan.draws

    def _fused(
        self, state: ModelState, context: Context, budget: Budget, rng: Stream
    ) -> Draft | None:
        """The tree by one program; None if there is none after all."""
        picks = self._picks(context)
        done = self._draft_by(self._plan, state, context, rng, sampled=not picks)
        if done is None:
            return None
        probs_BNV, tokens_BN, mask_BN = done
        if budget.tokens_B is not None:
            mask_BN = mask_BN & (budget.tokens_B[:, None] >= self._depth_N)
        drawn: Drawn = "chosen" if picks else self.drawn
        return self._tree.draft(tokens_BN, mask_BN, None if drawn == "chosen" else probs_BNV, drawn)

    def _logits(
        self, state: ModelState, context: Context, tokens_BN: Tensor, level: Level
    ) -> Tensor:
        """Logits after the level's nodes that have children, (B, n, V)."""
        if level.depth == 0:
            return self._catch_up(state, context)[:, None]
        tokens_Bn = tokens_BN[:, level.inner_n].clamp(max=self.model.num_tokens - 1)
        return self.model.extend(state.cache, tokens_Bn, level.nodes(context.num_rows))
