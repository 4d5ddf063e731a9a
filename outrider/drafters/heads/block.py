"""A head that drafts a block of tokens by one forward pass over the target's hidden states.

DFlash and DSpark, whose papers and network are in ``block_network.py``:

    context   c_0 … c_{r-1} of the tokens before the root r, whose keys and values are cached
    pass      the root and the mask tokens, after the context; nothing of the pass is kept
    draft     slot by slot, left to right (``slots.py``)
    commit    the target's hidden states of the root and the accepted tokens are kept; the next
              drafting begins by reading them into the context

P-EAGLE drafts alike from another cache and network: ``peagle.py``.

The context is exactly the tokens that the target has run over and committed, which a KV cache of
the network's layers holds (``newest.py``): prefilled from the prompt's hidden states, appended to
when a round begins, and written after, but not appended to, by the drafting pass. Where the target
is compiled, both passes and the draws of a chain are one program (``fused_draft.py``).

A row that lacks the hidden states of some of its tokens drafts nothing.

Proposes: i.i.d. chains, or trees of fixed shape.

Legend: B rows, N slots of the block or nodes of a draft, K tokens that a round keeps, D draft
vocabulary, V vocabulary, E width of the target's hidden states side by side, S slots of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Scores,
    Stream,
    cached_arange,
)
from outrider.core.errors import IncompatibleError
from outrider.drafters.chain.fused_model import draft_numbers, is_fusible
from outrider.drafters.chain.stop import Stop
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.block_model import BlockModel
from outrider.drafters.heads.newest import Newest, NewestCache
from outrider.drafters.heads.peagle import PEagleHead, PEagleModel
from outrider.drafters.heads.slots import chain_of_slots, tree_of_slots
from outrider.drafters.tree.grow import Children, StaticTree
from outrider.drafters.tree.topology import Topology
from outrider.runtime import HFModel


@dataclass
class BlockState:
    """The keys and values of the context, of the tokens before the root."""

    cache: NewestCache

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)


class BlockDrafter:
    """Drafts a chain from a block head, or a tree of fixed shape.

    Args:
        head: the weights, of which a copy is cast to the target's precision.
        target: the model that it was trained for.
        stop: where a row stops, by the head's confidence; the head must predict it.
        topology: the shape of a tree; None drafts chains.
        children: how a tree's children are drawn.
        num_fused: length of the chains that one compiled program drafts; 0 if none does.

    Raises:
        IncompatibleError: a head for another target, or a stop without a confidence; the message
            names both numbers.
    """

    def __init__(
        self,
        head: BlockHead | PEagleHead,
        target: HFModel,
        stop: Stop | None = None,
        *,
        topology: Topology | None = None,
        children: Children = "distinct",
        num_fused: int = 0,
    ) -> None:
        self.model: BlockModel | PEagleModel
        if isinstance(head, PEagleHead):
            self.model = PEagleModel(head, target)
        else:
            self.model = BlockModel(head, target)
        if stop is not None and not head.config.has_confidence:
            raise IncompatibleError(
                f"{head.name} predicts no confidence, so there is nothing to stop by before a "
                f"token is drawn: take a dspark head, or leave draft_confidence at 0"
            )
        self.config = head.config
        self.target = target
        self.stop = stop
        self._tree: StaticTree | None = None
        if topology is not None:
            self._tree = StaticTree(topology, children, target.num_tokens, target.device)
        is_free = stop is None and topology is None and self.model.compiled is not None
        self.num_fused = min(num_fused, head.config.num_slots) if is_free else 0

    @property
    def drawn(self) -> Drawn:
        return "iid" if self._tree is None else self._tree.drawn

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        config = self.config
        own = Capabilities[HFModel](
            (self.model,),
            hidden_layers=config.target_layers,
            depth=config.num_slots,
            max_nodes=lambda num_tokens: max(num_tokens + 1, config.block_size),
            fused_lengths=(self.num_fused,) if self.num_fused else (),
        )
        if self._tree is None:
            stops = self.stop is not None
            return replace(own, stops_early=stops)
        shape = self._tree.topology
        return replace(
            own,
            depth=min(shape.depth, config.num_slots),
            max_nodes=lambda num_tokens: max(shape.num_nodes, config.block_size),
            drafts_trees=not shape.is_chain,
        )

    def start(self, context: Context) -> BlockState:
        """An empty state; :meth:`read_prompt` fills it."""
        return BlockState(self.model.start(context))

    def read_prompt(
        self, state: BlockState, context: Context, hidden_BNH: Tensor, first: int
    ) -> None:
        """Reads the hidden states of a pass of the prefill."""
        self.model.read_prompt(state.cache, context, hidden_BNH, first)

    def propose(self, state: BlockState, context: Context, budget: Budget, rng: Stream) -> Draft:
        cache = state.cache
        cache.forget_draft()
        drafts_B = _complete(cache, context, self.model.least_known)
        if not budget.max_tokens:
            return Draft.root_only(context.root_B)
        draft = self._fused(cache, context, budget, rng) if drafts_B is None else None
        if draft is not None:
            return draft
        slots = self.model.predict(cache, context, budget.max_tokens)
        if self._tree is not None:
            return tree_of_slots(slots, self._tree, context, budget, rng, drafts_B)
        return chain_of_slots(slots, context, budget, rng, self.stop, drafts_B)

    def commit(self, state: BlockState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Keeps the hidden states of the root and the accepted tokens, to be read."""
        if scores.hidden_BNH is None:
            return
        cache = state.cache
        cache.forget_draft()
        if cache.is_waiting_long:
            self.model.catch_up(cache)
        cache.renew(Newest.emitted(draft, verdict, scores.hidden_BNH))

    def join(self, state: BlockState, other: BlockState) -> None:
        state.cache.join(other.cache)

    def _fused(
        self, cache: NewestCache, context: Context, budget: Budget, rng: Stream
    ) -> Draft | None:
        """The draft by one compiled program; None where there is none."""
        distribution, γ = context.distribution, self.num_fused
        if not γ or budget.max_tokens != γ or not is_fusible(distribution):
            return None
        numbers = draft_numbers(context, rng, γ)
        done = self.model.draft(cache, context.root_B[:, None], γ, *numbers)
        if done is None:
            return None
        probs_BNV, tokens_BN = done
        mask_BN = None
        if budget.tokens_B is not None:
            mask_BN = cached_arange(γ + 1, context.device) <= budget.tokens_B[:, None]
        if distribution.greedy:
            return Draft.chain(tokens_BN, mask_BN, None, "chosen")
        return Draft.chain(tokens_BN, mask_BN, probs_BNV, "iid")


def _complete(cache: NewestCache, context: Context, least: int) -> Tensor | None:
    """Which rows have the hidden states of all tokens before their root, and of at least so many,
    (B,); None for all."""
    known = cache.known.host
    complete = [n == m - 1 and n >= least for n, m in zip(known, context.lengths, strict=True)]
    return None if all(complete) else torch.tensor(complete, device=context.device)
