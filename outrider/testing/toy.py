"""Toy models and drafters with known distributions: small enough to enumerate, complete enough to
run in real rounds.

A toy model is a table of logits. The tokens before a position are folded into one number that
selects a row of the table: the last ``order`` tokens, or a hash of the whole prefix. Distributions
therefore depend on the context, and tests notice a token verified at the wrong position, a stale
cache entry or a shifted draft distribution.

Legend: B rows, T context length, N nodes (node 0 is the root), D drafted tokens (N-1), M positions,
K drafted tokens, V vocabulary, E entries of the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Prefix,
    Role,
    Scores,
    Stream,
    Verdict,
    draw,
)
from outrider.core.rng import fold, fold_by_numpy


@dataclass
class SoftmaxDistribution:
    """A minimal ``core.Distribution``: softmax at a temperature, or a point mass at the argmax."""

    greedy: bool = False
    temperature: float = 1.0

    def logits(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        return logits_BMV.to(torch.promote_types(logits_BMV.dtype, torch.float32))

    def __call__(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        z_BMV = self.logits(logits_BMV, prefix)
        if self.greedy:
            return torch.zeros_like(z_BMV).scatter_(-1, z_BMV.argmax(-1, keepdim=True), 1.0)
        return (z_BMV / self.temperature).softmax(-1)


@dataclass
class ToyCache:
    """The state of a toy model or drafter for a batch.

    Attributes:
        past_B: the number that represents all tokens before the root.
        node_BN: the same including each node of the last scored draft (written by ``score``).
    """

    past_B: Tensor
    node_BN: Tensor | None = None

    def keep(self, rows: Sequence[int]) -> None:
        self.past_B = self.past_B[torch.tensor(rows, dtype=torch.int64)]


@dataclass
class ToyModel:
    """A target (``core.Model``) whose logits are rows of a table.

    Attributes:
        table_EV: the logits. ``-inf`` makes a token impossible.
        order: the number of preceding tokens that the distribution depends on (then E = V^order);
            None means all of them.
    """

    table_EV: Tensor
    order: int | None = None

    @classmethod
    def random(
        cls,
        vocab_size: int = 3,
        order: int | None = None,
        seed: int = 0,
        *,
        scale: float = 1.5,
        num_impossible: int = 0,
    ) -> "ToyModel":
        """Normally distributed logits in float64; ``num_impossible`` per row are ``-inf``."""
        generator = torch.Generator().manual_seed(seed)
        num_entries = 1009 if order is None else vocab_size**order
        shape = (num_entries, vocab_size)
        table_EV = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        if num_impossible:
            order_EV = torch.rand(shape, generator=generator).argsort(1)
            table_EV.scatter_(1, order_EV[:, :num_impossible], -torch.inf)
        return cls(table_EV, order)

    @property
    def vocab_size(self) -> int:
        return self.table_EV.shape[1]

    def start(self, context: Context) -> ToyCache:
        past_B = torch.zeros_like(context.length_B)
        for t in range(max(context.lengths) - 1):
            read_B = self.read(past_B, context.tokens_BT[:, t])
            past_B = torch.where(t < context.length_B - 1, read_B, past_B)
        return ToyCache(past_B)

    def score(self, cache: ToyCache, draft: Draft) -> Scores:
        cache.node_BN = self.read_draft(cache.past_B, draft)
        return Scores(self.logits(cache.node_BN))

    def commit(self, cache: ToyCache, draft: Draft, verdict: Verdict) -> None:
        if cache.node_BN is None:
            raise RuntimeError("commit without score")
        cache.past_B = cache.node_BN.gather(1, last_accepted(verdict)[:, None])[:, 0]
        cache.node_BN = None

    def join(self, cache: ToyCache, other: ToyCache) -> None:
        cache.past_B = torch.cat([cache.past_B, other.past_B])

    def read(self, past: Tensor, token: Tensor) -> Tensor:
        """Folds one more token into the past. Any shape."""
        if self.order is None:
            return fold_by_numpy(past, token) if past.device.type == "cpu" else fold(past, token)
        return (past * self.vocab_size + token) % self.table_EV.shape[0]

    def read_draft(self, past_B: Tensor, draft: Draft) -> Tensor:
        """The past including each node, shape (B, N)."""
        rows_B = torch.arange(past_B.shape[0])
        node_BN = self.read(past_B, draft.tokens_BN[:, 0])[:, None].repeat(1, draft.num_nodes)
        for i in range(1, draft.num_nodes):
            parent_B = node_BN[rows_B, draft.parents_BN[:, i]]
            node_BN[:, i] = self.read(parent_B, draft.tokens_BN[:, i])
        return node_BN

    def logits(self, past: Tensor) -> Tensor:
        """Logits of the next token, shape (…, V)."""
        return self.table_EV[past % self.table_EV.shape[0]]


class ToyDrafter:
    """Grows a ``width``-ary tree (a chain if the width is 1) from a toy model's distribution.

    Node i is a child of node ``(i - 1) // width``. It is drawn with number i-1 of ``Role.DRAFT``,
    by the inverse CDF of the context's distribution.

    Args:
        model: the model that provides the logits.
        width: children per node.
        drawn: ``iid`` draws, ``distinct`` draws without replacement, ``chosen``: the most probable
            tokens, or ``searched``: the more probable of two draws without replacement, which is
            beam sampling of width 1.
        confidence: tokens less probable than this get no children. The token itself stays, so the
            draft remains a fair sample.
    """

    def __init__(
        self, model: ToyModel, width: int = 1, drawn: Drawn = "iid", *, confidence: float = 0.0
    ) -> None:
        self.model = model
        self.width = width
        self.drawn: Drawn = drawn
        self.confidence = confidence

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(drafts_trees=self.width > 1)

    def start(self, context: Context) -> ToyCache:
        return self.model.start(context)

    def propose(self, state: ToyCache, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft, q_BNV = self.grow(state, context, budget, rng)
        probs_BNV = None if self.drawn == "chosen" else q_BNV
        return Draft(
            draft.tokens_BN, draft.parents_BN, draft.mask_BN, probs_BNV, self.drawn, draft.is_chain
        )

    def commit(self, state: ToyCache, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        node_BN = self.model.read_draft(state.past_B, draft)
        state.past_B = node_BN.gather(1, last_accepted(verdict)[:, None])[:, 0]

    def join(self, state: ToyCache, other: ToyCache) -> None:
        self.model.join(state, other)

    def grow(
        self, state: ToyCache, context: Context, budget: Budget, rng: Stream
    ) -> tuple[Draft, Tensor]:
        """The tree without its distributions, and the distribution at every node including leaves,
        (B, N, V)."""
        N = budget.max_tokens + 1
        root_B = context.root_B
        B = root_B.shape[0]
        parents_N = torch.arange(-1, N - 1) // self.width
        u_BD = rng.uniform(Role.DRAFT, max(N - 1, 1))
        limit_B = torch.full((B,), N - 1) if budget.tokens_B is None else budget.tokens_B
        all_BN = torch.ones(B, N, dtype=torch.bool)
        parents_BN, root_BN = parents_N.expand(B, N), root_B[:, None].expand(B, N)
        ancestors_BNN = Draft(root_BN, parents_BN, all_BN, None, "chosen").ancestors_BNN

        tokens, pasts = [root_B], [self.model.read(state.past_B, root_B)]
        exists = [torch.ones(B, dtype=torch.bool)]
        grows = [exists[0]]
        distributions: list[Tensor] = []
        for i in range(N):
            drafted_BK = torch.stack(tokens, 1)[:, 1:]
            prefix = prefix_of_node(context, drafted_BK, ancestors_BNN, i)
            distributions.append(
                context.distribution(self.model.logits(pasts[i])[:, None], prefix)[:, 0]
            )
            if i + 1 == N:
                break
            parent = i // self.width
            siblings = range(parent * self.width + 1, i + 1)
            weights_BV = distributions[parent]
            if self.drawn != "iid":
                for sibling in siblings:
                    weights_BV = weights_BV.scatter(1, tokens[sibling][:, None], 0.0)
            token_B = (
                weights_BV.argmax(1)
                if self.drawn == "chosen"
                else draw(_more_probable_of_two(weights_BV), u_BD[:, i])
                if self.drawn == "searched"
                else draw(weights_BV, u_BD[:, i])
            )
            q_B = distributions[parent].gather(1, token_B[:, None])[:, 0]
            exists.append(grows[parent] & (weights_BV.sum(1) > 0) & (i < limit_B))
            grows.append(exists[-1] & (q_B >= self.confidence))
            tokens.append(token_B)
            pasts.append(self.model.read(pasts[parent], token_B))
        tokens_BN, mask_BN = torch.stack(tokens, 1), torch.stack(exists, 1)
        if self.width == 1:
            draft = Draft.chain(tokens_BN, mask_BN, None, "chosen")
        else:
            draft = Draft(tokens_BN, parents_BN, mask_BN, None, "chosen")
        return draft, torch.stack(distributions, 1)


def last_accepted(verdict: Verdict) -> Tensor:
    """The deepest accepted node, or the root if none was accepted, shape (B,)."""
    nodes_BN = torch.nn.functional.pad(verdict.path_BD, (1, 0))
    return nodes_BN.gather(1, verdict.num_accepted_B[:, None])[:, 0]


def _more_probable_of_two(weights_BV: Tensor) -> Tensor:
    """The distribution of the more probable of two draws without replacement, (B, V).

    x and then y are drawn with probability ``q(x) q(y) / (1 - q(x))``. A point mass stays as it is.
    """
    q_BV = weights_BV / weights_BV.sum(1, keepdim=True).clamp(min=1e-300)
    others_BV = (1 - q_BV).clamp(min=1e-300)
    x_then_y_BVV = (q_BV / others_BV)[:, :, None] * q_BV[:, None]
    either_BVV = x_then_y_BVV + x_then_y_BVV.mT
    token_V = torch.arange(q_BV.shape[1])
    beats_BVV = (q_BV[:, :, None] > q_BV[:, None]) | (
        (q_BV[:, :, None] == q_BV[:, None]) & (token_V[:, None] < token_V)
    )
    best_BV = either_BVV.where(beats_BVV, 0.0).sum(2)
    return best_BV.where((q_BV > 0).sum(1, keepdim=True) > 1, q_BV)


def prefix_of_node(
    context: Context, drafted_BK: Tensor, ancestors_BNN: Tensor, node: int
) -> Prefix:
    """The prefix of one node of a tree that is still growing."""
    return Prefix(
        context, lambda: drafted_BK, lambda: ancestors_BNN[:, node : node + 1, 1 : node + 1]
    )
