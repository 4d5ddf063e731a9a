"""Drafts from slots: heads that predict several tokens in one forward pass, a slot per depth.

    x_i ~ q_i,   q_i = the request's distribution of z_i(x_{i-1}),   i = 1 … γ

z_i are the logits of slot i. Some heads correct them by the token before, others do not; either way
the pass over the network is over when drafting begins. Behind every node of depth i - 1 the same
slot predicts, so a tree costs no more passes than a chain.

A head may also predict how probably slot i's token will be accepted, a_i, before the token is
drawn: from x_1 … x_{i-1} alone. A stop (``chain/stop.py``) then reads a_i in place of q(x_i), and
the draft ends *in front of* slot i. Whether x_i is drawn does not depend on x_i, so a lossless rule
stays lossless.

A head with a reduced vocabulary draws within it where it can, which costs less than drawing from
all of the target's tokens: temperature and truncation depend on the logits alone. A bias, a penalty
or a processor depends on the tokens, so there the logits are widened first.

Legend: B rows, N nodes, n nodes of one depth, V vocabulary of the target, D draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Prefix, Stream, argmax, cached_arange
from outrider.core.chain import draft_chain, with_leaf
from outrider.drafters.chain.pick import INDEPENDENT
from outrider.drafters.chain.stop import Stop
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.tree.grow import Level, StaticTree
from outrider.sampling import Warp


@dataclass(frozen=True)
class Slots:
    """What a head predicts after the root of each row.

    Attributes:
        num: how many slots there are: the longest draft.
        logits: from the number of a slot, 0 for the root's successor, and the tokens before it,
            (B, n), to its logits, (B, n, D) or (B, 1, D) where they do not depend on these tokens.
        vocabulary: the draft vocabulary; None where it is the target's.
        confidence: from the number of a slot and the tokens before it, (B,), to the probability
            that its token is accepted, (B,); None if the head does not predict it.
    """

    num: int
    logits: Callable[[int, Tensor], Tensor]
    vocabulary: DraftVocabulary | None = None
    confidence: Callable[[int, Tensor], Tensor] | None = None


def chain_of_slots(
    slots: Slots,
    context: Context,
    budget: Budget,
    rng: Stream,
    stop: Stop | None = None,
    drafts_B: Tensor | None = None,
) -> Draft:
    """A chain of independent draws, or of the best tokens where all rows are greedy.

    Args:
        slots: what the head predicts.
        context: the batch.
        budget: most tokens.
        rng: the round's random numbers.
        stop: where a row stops, by the slots' confidence.
        drafts_B: which rows get a draft; None for all.
    """
    γ = min(slots.num, budget.max_tokens)
    going = None if stop is None else _Going(slots, stop, context)
    if not γ or (going is not None and not going.on([context.root_B])):
        return Draft.root_only(context.root_B)
    greedy = context.distribution.greedy
    warp = context.distribution.logits if greedy else context.distribution
    pick = _argmax if greedy else INDEPENDENT.start(rng, γ)
    within = slots.vocabulary if _draws_within(slots, context) else None
    widening = slots.vocabulary if within is None else None

    def step(tokens: Sequence[Tensor]) -> Tensor:
        logits_B1D = slots.logits(len(tokens) - 1, tokens[-1][:, None])
        return (logits_B1D if widening is None else widening.widened(logits_B1D))[:, 0]

    def choose(logits_BD: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        exists_B = None if going is None else going.exists[-1]
        q_BD = warp(logits_BD[:, None], Prefix.of_chain(context, tokens[1:], exists_B))[:, 0]
        x_B = pick(q_BD, len(tokens) - 1)
        return q_BD, x_B if within is None else within.target_ids_D[x_B]

    drafted = [context.root_B]

    def goes_on(q_BD: Tensor, x_B: Tensor) -> bool:
        drafted.append(x_B)
        return going is None or len(drafted) > γ or going.on(drafted)

    tokens, rows = draft_chain(context.root_B, γ, step, choose, goes_on)
    mask_BN = None if going is None else going.mask_BN(len(tokens))
    most_B = budget.tokens_B
    if most_B is not None:
        mask_BN = _and(mask_BN, cached_arange(len(tokens), context.device) <= most_B[:, None])
    if drafts_B is not None:
        is_root_N = cached_arange(len(tokens), context.device) == 0
        mask_BN = _and(mask_BN, drafts_B[:, None] | is_root_N)
    tokens_BN = torch.stack(tokens, 1)
    if greedy:
        return Draft.chain(tokens_BN, mask_BN, None, "chosen")
    probs_BND = with_leaf(rows)
    probs_BNV = probs_BND if within is None else _spread(probs_BND, within)
    return Draft.chain(tokens_BN, mask_BN, probs_BNV, "iid")


def tree_of_slots(
    slots: Slots,
    tree: StaticTree,
    context: Context,
    budget: Budget,
    rng: Stream,
    drafts_B: Tensor | None = None,
) -> Draft:
    """A tree of fixed shape, no deeper than there are slots; arguments as for a chain."""

    def logits(tokens_BN: Tensor, level: Level) -> Tensor:
        before_Bn = tokens_BN[:, level.inner_n]
        logits_BnV = slots.logits(level.depth, before_Bn)
        if slots.vocabulary is not None:
            logits_BnV = slots.vocabulary.widened(logits_BnV)
        return logits_BnV.expand(-1, before_Bn.shape[1], -1)

    if budget.max_tokens > slots.num:
        budget = Budget(slots.num, budget.tokens_B)
    return tree.grow(context, budget, rng, logits, drafts_B)


class _Going:
    """Which rows of a draft have not stopped yet.

    Attributes:
        exists: by node, whether it exists in each row (B,); of the nodes so far and the next one.
    """

    def __init__(self, slots: Slots, stop: Stop, context: Context) -> None:
        assert slots.confidence is not None
        self._confidence = slots.confidence
        self._stop = stop
        self._survival_B = torch.ones((), device=context.device)
        self.exists = [torch.ones(context.num_rows, dtype=torch.bool, device=context.device)]

    def on(self, tokens: Sequence[Tensor]) -> bool:
        """Whether any row goes on after these tokens, root first, each (B,). Waits for the
        device."""
        a_B = self._confidence(len(tokens) - 1, tokens[-1])
        self._survival_B = self._survival_B * a_B
        going_B = self.exists[-1] & self._stop.goes_on(a_B, self._survival_B)
        self.exists.append(going_B)
        return bool(going_B.any())

    def mask_BN(self, num_nodes: int) -> Tensor:
        """Which of the first nodes exist, (B, N)."""
        return torch.stack(self.exists[:num_nodes], 1)


def _draws_within(slots: Slots, context: Context) -> bool:
    """Whether the request's distribution can be computed within the draft vocabulary."""
    distribution = context.distribution
    reduced = slots.vocabulary is not None
    return reduced and isinstance(distribution, Warp) and distribution.keeps_logits


def _spread(probs_BND: Tensor, vocabulary: DraftVocabulary) -> Tensor:
    """Distributions over the target's tokens, (B, N, V): 0 for those that cannot be drafted."""
    B, N, _ = probs_BND.shape
    probs_BNV = probs_BND.new_zeros(B, N, vocabulary.num_tokens)
    return probs_BNV.index_copy_(2, vocabulary.target_ids_D, probs_BND)


def _argmax(row_BV: Tensor, i: int) -> Tensor:
    return argmax(row_BV)


def _and(mask_BN: Tensor | None, other_BN: Tensor) -> Tensor:
    return other_BN if mask_BN is None else mask_BN & other_BN
