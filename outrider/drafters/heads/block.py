"""A head that drafts a block of tokens by one forward pass over the target's hidden states.

DFlash and DSpark; ``block_network.py`` has the papers and the network.

    context   c_0 … c_{r-1} of the tokens before the root r, whose keys and values are cached
    pass      the root and the mask tokens, after the context; nothing of the pass is kept
    draft     slot by slot, left to right (``slots.py``)
    commit    the target's hidden states of the root and the accepted tokens join the context

The context is exactly the tokens that the target has run over and committed, which a ``KVCache`` of
the network's layers holds: prefilled from the prompt's hidden states, appended to after each round,
and written after, but not appended to, by the drafting pass.

A row that lacks the hidden states of some of its tokens drafts nothing.

Proposes: i.i.d. chains, or trees of fixed shape.

Legend: B rows, N slots of the block or nodes of a draft, K tokens that a round keeps, D draft
vocabulary, V vocabulary, E width of the target's hidden states side by side, S slots of the cache.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Lengths,
    Scores,
    Stream,
    cached_arange,
)
from outrider.core.errors import IncompatibleError
from outrider.drafters.chain.stop import Stop
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.slots import Slots, chain_of_slots, tree_of_slots
from outrider.drafters.tree.grow import Children, StaticTree
from outrider.drafters.tree.topology import Topology
from outrider.runtime import HFModel, KVCache
from outrider.runtime.hf.adapter import MARGIN
from outrider.runtime.kv_cache.storage import KVCachePlan, query_slots


@dataclass
class BlockState:
    """The keys and values of the context, of the tokens before the root."""

    cache: KVCache

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)


class BlockOutput(NamedTuple):
    """What the drafting pass computed of the slots that predict a token.

    Attributes:
        h_BNH: the network's outputs.
        logits_BND: their logits, without the correction by the token before.
    """

    h_BNH: Tensor
    logits_BND: Tensor


class BlockDrafter:
    """Drafts a chain from a block head, or a tree of fixed shape.

    Args:
        head: the weights, of which a copy is cast to the target's precision.
        target: the model that it was trained for.
        stop: where a row stops, by the head's confidence; the head must predict it.
        topology: the shape of a tree; None drafts chains.
        children: how a tree's children are drawn.

    Raises:
        IncompatibleError: a head for another target, or a stop without a confidence; the message
            names both numbers.
    """

    def __init__(
        self,
        head: BlockHead,
        target: HFModel,
        stop: Stop | None = None,
        *,
        topology: Topology | None = None,
        children: Children = "distinct",
    ) -> None:
        head.check(target)
        if stop is not None and not head.config.has_confidence:
            raise IncompatibleError(
                f"{head.name} predicts no confidence, so there is nothing to stop by before a "
                f"token is drawn: take a dspark head, or leave draft_confidence at 0"
            )
        network = copy.deepcopy(head.network).to(target.device, target.dtype)
        self.network = network.eval().requires_grad_(False)
        self.config = head.config
        self.target = target
        self.stop = stop
        self._tree: StaticTree | None = None
        if topology is not None:
            self._tree = StaticTree(topology, children, target.num_tokens, target.device)
        reduced = network.lm_head is not None
        self._vocabulary = head.vocabulary.to(target.device) if reduced else None
        self._output = network.lm_head or target.module.get_output_embeddings()
        masks = (1, self.config.block_size - 1)
        self._masks_1N = torch.full(masks, self.config.mask_token_id, device=target.device)

    @property
    def drawn(self) -> Drawn:
        return "iid" if self._tree is None else self._tree.drawn

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        config = self.config
        own = Capabilities[HFModel](
            hidden_layers=config.target_layers,
            depth=config.num_slots,
            max_nodes=lambda num_tokens: max(num_tokens + 1, config.block_size),
            slot_bytes=self.network.bytes_per_token,
        )
        if self._tree is None:
            stops = self.stop is not None
            return replace(own, full_chains=not stops, stops_early=stops)
        shape = self._tree.topology
        return replace(
            own,
            depth=min(shape.depth, config.num_slots),
            max_nodes=lambda num_tokens: max(shape.num_nodes, config.block_size),
            drafts_trees=not shape.is_chain,
        )

    def start(self, context: Context) -> BlockState:
        """An empty state; :meth:`read_prompt` fills it."""
        num_layers, limit = len(self.network.layers), self.target.limit + MARGIN
        plan = KVCachePlan(memory_budget=self.target.plan.memory_budget)
        return BlockState(KVCache(context, num_layers, limit, plan))

    def read_prompt(
        self, state: BlockState, context: Context, hidden_BNH: Tensor, first: int
    ) -> None:
        """Adds the hidden states of a pass of the prefill; those beyond a row's last token but one
        are dropped when the row drafts."""
        self._append(state.cache, hidden_BNH, hidden_BNH.shape[1])

    def propose(self, state: BlockState, context: Context, budget: Budget, rng: Stream) -> Draft:
        drafts_B = self._complete(state, context)
        if not budget.max_tokens or drafts_B is False:
            return Draft.root_only(context.root_B)
        slots = self._slots(self._run(state.cache, context, budget.max_tokens))
        rows_B = None if drafts_B is True else drafts_B
        if self._tree is not None:
            return tree_of_slots(slots, self._tree, context, budget, rng, rows_B)
        return chain_of_slots(slots, context, budget, rng, self.stop, rows_B)

    def commit(self, state: BlockState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Adds the hidden states of the root and the accepted tokens."""
        cache, hidden_BNE = state.cache, scores.hidden_BNH
        if hidden_BNE is None:
            return
        cache.rollback(cache.context.sequence_lengths - 1)
        kept = _where(_is_complete(cache), verdict.num_emitted)
        K = max(kept.host)
        if draft.is_chain:
            hidden_BKE = hidden_BNE[:, :K]
        else:
            node_BK = torch.nn.functional.pad(verdict.path_BD, (1, 0))[:, :K, None]
            hidden_BKE = hidden_BNE.gather(1, node_BK.expand(-1, -1, hidden_BNE.shape[2]))
        if K:
            self._append(cache, hidden_BKE, kept)

    def join(self, state: BlockState, other: BlockState) -> None:
        state.cache.join(other.cache)

    def _append(self, cache: KVCache, hidden_BNE: Tensor, kept: Lengths | int) -> None:
        """Caches the keys and values of more of the context; keeps the first ``kept`` of them."""
        num = hidden_BNE.shape[1]
        context_BNH = self.network.context(hidden_BNE.to(self.target.dtype))
        position_BN = query_slots(cache.length_B, 0, num)
        cache.begin(num)
        by_layer = self.network.context_keys_values(context_BNH, position_BN)
        for number, (key_BANC, value_BANC) in enumerate(by_layer):
            cache.update(key_BANC, value_BANC, number)
        cache.append(kept)

    def _complete(self, state: BlockState, context: Context) -> Tensor | bool:
        """Which rows have the hidden states of all tokens before their root, (B,); True for all,
        False for none."""
        state.cache.rollback(context.sequence_lengths - 1)
        complete = _is_complete(state.cache)
        if all(complete) or not any(complete):
            return all(complete)
        return torch.tensor(complete, device=context.device)

    def _run(self, cache: KVCache, context: Context, max_tokens: int) -> BlockOutput:
        """The drafting pass."""
        config = self.config
        masks_BN = self._masks_1N.expand(context.num_rows, -1)
        tokens_BN = torch.cat([context.root_B[:, None], masks_BN], 1)
        noise_BNH = embedding(tokens_BN, self.target.module.get_input_embeddings().weight)
        cache.begin(config.block_size)
        position_BN = query_slots(cache.length_B, 0, config.block_size)
        mask_B11S = None
        if not cache.is_uniform:
            slot_S = cached_arange(cache.span, context.device)
            mask_B11S = (slot_S < (cache.length_B + config.block_size)[:, None])[:, None, None]
        h_BNH = self.network(noise_BNH, position_BN, cache.update, mask_B11S)
        h_BNH = h_BNH[:, config.first_slot : config.first_slot + max_tokens]
        return BlockOutput(h_BNH, self._output(h_BNH))

    def _slots(self, output: BlockOutput) -> Slots:
        """What the block predicts, slot by slot."""
        network = self.network

        def logits(slot: int, before_Bn: Tensor) -> Tensor:
            logits_BnD = output.logits_BND[:, slot, None]
            correction_BnD = network.correction(before_Bn)
            if correction_BnD is not None:
                logits_BnD = logits_BnD + correction_BnD
            return logits_BnD

        def confidence(slot: int, before_B: Tensor) -> Tensor:
            return network.confidence_logits(output.h_BNH[:, slot], before_B).float().sigmoid()

        num = output.h_BNH.shape[1]
        has_confidence = network.confidence_head is not None
        return Slots(num, logits, self._vocabulary, confidence if has_confidence else None)


def _is_complete(cache: KVCache) -> list[bool]:
    """By row, whether the context holds all tokens before the root."""
    return [n == m - 1 for n, m in zip(cache.lengths, cache.context.lengths, strict=True)]


def _where(rows: Sequence[bool], lengths: Lengths) -> Lengths:
    """The lengths of these rows, and 0 for the others."""
    if all(rows):
        return lengths
    host = [n if row else 0 for n, row in zip(lengths.host, rows, strict=True)]
    return Lengths.of(host, lengths.device_B.device)
