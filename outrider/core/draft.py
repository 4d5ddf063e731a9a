"""The nouns that travel between drafter, verifier and commit.

Legend: B rows (sequences), N nodes of a draft tree (node 0 is the root), D drafted tokens (N-1,
which is also the greatest possible depth), K emitted tokens (D+1), Q query tokens, V vocabulary, H
hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from outrider.core.chain import chain_tensors_like
from outrider.core.lengths import Lengths
from outrider.core.query_tokens import QueryTokens
from outrider.core.tree import tree_tensors

Drawn = Literal["iid", "distinct", "chosen", "searched"]


@dataclass(frozen=True)
class Draft:
    """A batch of token trees in topological order; a chain is a thin tree.

    Node 0 is the root: the last committed token, which the target has not cached yet.

    Attributes:
        tokens_BN: token of each node.
        parents_BN: parent of each node; ``parents[b, i] < i`` and ``parents[b, 0] = -1``.
        mask_BN: which nodes exist; the parent of an existing node exists, and the root always does.
        probs_BNV: row i is the distribution that the children of node i were drawn from (for
            searched drafts: the draft distribution at node i). None iff ``drawn == "chosen"``, or
            if a search has no distributions to report.
        drawn: how siblings were obtained: independent draws (``iid``, in draw order), draws without
            replacement (``distinct``, in draw order), picks of a deterministic rule (``chosen``),
            or results of a search over the draft distributions, such as beam search
            (``searched``). A searched token is neither a draw from those distributions nor a point
            mass, so a rule that preserves the target distribution by means of q cannot verify it.
        is_chain: every node's parent is the preceding node. Known on the host.
        logits_BNV: the draft model's own logits at each node, before temperature and truncation;
            None unless the verification rule reads them.
        step_probs_BN: for a search, the probability of each token's path divided by the total over
            all continuations of all beams at that step; 1 at the root. None from other drafters.
        drawn_probs_BN: for chosen tokens that were drawn with noise shared with the rule, the
            draft probability of each token given its parent, for the statistics; arbitrary at the
            root. None from other drafters.
        max_walk_length: the most nodes that a walk down from the root can visit, rejected siblings
            included, where the drafter knows this number on the host.
        is_full: the draft is a chain all of whose nodes are known, on the host, to exist. Only
            :meth:`chain` sets it; a copy with changed fields does not inherit it.
        parents: the parent of each node, where it is known on the host and the same in all rows.
            Only :meth:`tree` sets it; a copy with changed fields does not inherit it.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    mask_BN: Tensor
    probs_BNV: Tensor | None
    drawn: Drawn
    is_chain: bool = False
    logits_BNV: Tensor | None = None
    step_probs_BN: Tensor | None = None
    max_walk_length: int | None = None
    drawn_probs_BN: Tensor | None = None
    is_full: bool = field(default=False, init=False)
    parents: tuple[int, ...] | None = field(default=None, init=False)

    @classmethod
    def chain(
        cls,
        tokens_BN: Tensor,
        mask_BN: Tensor | None,
        probs_BNV: Tensor | None,
        drawn: Drawn,
        logits_BNV: Tensor | None = None,
        step_probs_BN: Tensor | None = None,
        drawn_probs_BN: Tensor | None = None,
    ) -> "Draft":
        """A batch of chains: node i follows node i-1. Shapes as in the class; without a mask, all
        nodes exist."""
        full = chain_tensors_like(tokens_BN)
        all_BN = full.mask_BN if mask_BN is None else mask_BN
        draft = cls(
            tokens_BN,
            full.parents_BN,
            all_BN,
            probs_BNV,
            drawn,
            True,
            logits_BNV,
            step_probs_BN,
            drawn_probs_BN=drawn_probs_BN,
        )
        object.__setattr__(draft, "is_full", mask_BN is None)  # `replace` resets it
        return draft

    @classmethod
    def tree(
        cls,
        parents: tuple[int, ...],
        tokens_BN: Tensor,
        mask_BN: Tensor,
        probs_BNV: Tensor | None,
        drawn: Drawn,
        max_walk_length: int | None = None,
    ) -> "Draft":
        """A batch of trees of the same shape. ``parents`` is that of each node, -1 for the root;
        the others are as in the class."""
        parents_BN = tree_tensors(parents, tokens_BN.shape[0], tokens_BN.device).parents_BN
        draft = cls(
            tokens_BN, parents_BN, mask_BN, probs_BNV, drawn, max_walk_length=max_walk_length
        )
        object.__setattr__(draft, "parents", parents)  # `replace` resets it
        return draft

    @classmethod
    def root_only(cls, root_B: Tensor) -> "Draft":
        """The empty draft. Plain decoding is a round with an empty draft."""
        return cls.chain(root_B[:, None], None, None, "chosen")

    @cached_property
    def num_nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @cached_property
    def num_drafted_B(self) -> Tensor:
        """Drafted tokens per row, not counting the root."""
        if self.is_full:
            return chain_tensors_like(self.tokens_BN).num_drafted_B
        return self.mask_BN.sum(1) - 1

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """``[b, i, j]`` is true iff j is i or an ancestor of i."""
        B, N = self.tokens_BN.shape
        if self.parents is not None:
            return tree_tensors(self.parents, B, self.tokens_BN.device).ancestors_BNN
        eye_NN = torch.eye(N, dtype=torch.bool, device=self.tokens_BN.device)
        if self.is_chain:
            return torch.ones_like(eye_NN).tril().expand(B, N, N)
        ancestors_BNN = eye_NN.expand(B, N, N)
        above_BN = self.parents_BN.clamp(min=0)
        for _ in range(self.walk_length_bound.bit_length()):  # each pass doubles the reach
            ancestors_BNN = ancestors_BNN | ancestors_BNN.gather(
                1, above_BN[..., None].expand(B, N, N)
            )
            above_BN = above_BN.gather(1, above_BN)
        return ancestors_BNN

    @cached_property
    def depth_BN(self) -> Tensor:
        """Number of edges between each node and the root."""
        if self.is_chain:
            return chain_tensors_like(self.tokens_BN).depth_BN
        if self.parents is not None:
            B = self.tokens_BN.shape[0]
            return tree_tensors(self.parents, B, self.tokens_BN.device).depth_BN
        return self.ancestors_BNN.sum(2) - 1

    @property
    def walk_length_bound(self) -> int:
        """Upper bound, known on the host, on the nodes that a walk down from the root visits."""
        return self.num_nodes - 1 if self.max_walk_length is None else self.max_walk_length

    @cached_property
    def walk_step_BN(self) -> Tensor:
        """The step at which a walk down from the root visits each node: 0 for the root.

        A node is visited after its ancestors, and after the elder siblings of its ancestors and its
        own. Nodes with the same step have different parents.
        """
        node_N = torch.arange(self.num_nodes, device=self.tokens_BN.device)
        is_sibling_BNN = self.parents_BN[:, :, None] == self.parents_BN[:, None]
        rank_BN = (is_sibling_BNN & (node_N[:, None] >= node_N)).sum(2)
        return torch.where(self.ancestors_BNN, rank_BN[:, None], 0).sum(2) - 1

    @cached_property
    def query_tokens(self) -> QueryTokens:
        """The query tokens of the target's forward pass over this draft."""
        if self.drawn == "iid" and self.tokens_BN.device.type == "cpu":
            return self.merged_query_tokens()
        return QueryTokens.one_per_node(self.ancestors_BNN, self.depth_BN)

    def merged_query_tokens(self) -> QueryTokens:
        """One query token per distinct path of tokens. Synchronises with the device."""
        if self.tokens_BN.device.type == "cpu":
            shared, B = self.parents, len(self.tokens_BN)
            parents = self.parents_BN.tolist() if shared is None else [shared] * B
            found = QueryTokens.one_per_path_on_host(self.tokens_BN, self.mask_BN, parents)
            return found or QueryTokens.one_per_node(self.ancestors_BNN, self.depth_BN)
        return QueryTokens.one_per_path(
            self.tokens_BN, self.mask_BN, self.ancestors_BNN, self.depth_BN
        )


@dataclass(frozen=True)
class Scores:
    """The target's logits over a draft, and its hidden states if requested.

    Attributes:
        logits_BQV: at each query token.
        hidden_BQH: the same.
        queries: which query token each node has; None where every node is one.
    """

    logits_BQV: Tensor
    hidden_BQH: Tensor | None = None
    queries: QueryTokens | None = None

    @cached_property
    def logits_BNV(self) -> Tensor:
        """The logits at every node."""
        return self.logits_BQV if self.queries is None else self.queries.to_nodes(self.logits_BQV)

    def of_rows(self, choose: Callable[[Tensor], Tensor]) -> "Scores":
        """Those of some rows, which ``choose`` takes from a tensor of all rows, at every node."""
        hidden_BNH = self.hidden_BNH
        return Scores(choose(self.logits_BNV), None if hidden_BNH is None else choose(hidden_BNH))

    @cached_property
    def hidden_BNH(self) -> Tensor | None:
        """The hidden states at every node."""
        if self.hidden_BQH is None or self.queries is None:
            return self.hidden_BQH
        return self.queries.to_nodes(self.hidden_BQH)


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided.

    Attributes:
        path_BD: the accepted nodes, starting at a child of the root; entries from index
            ``num_accepted`` onwards are arbitrary but valid node indices.
        num_accepted_B: length of the accepted path.
        next_token_B: the token emitted after the path: a correction, a bonus token, or a plain
            sample.
    """

    path_BD: Tensor
    num_accepted_B: Tensor
    next_token_B: Tensor

    @cached_property
    def num_emitted_B(self) -> Tensor:
        """Number of emitted tokens: the accepted ones and the next token."""
        return self.num_accepted_B + 1

    def read(self, num_accepted: Sequence[int] | None = None) -> "Acceptance":
        """The verdict with its counts on the host, as ``commit`` takes it.

        Args:
            num_accepted: the counts, where the caller has read them; None reads them here, which
                waits for the device.
        """
        host = self.num_accepted_B.tolist() if num_accepted is None else list(num_accepted)
        accepted = Lengths(host, self.num_accepted_B)
        return Acceptance(
            self.path_BD, self.num_accepted_B, self.next_token_B, accepted, accepted + 1
        )

    def emitted(self, draft: Draft) -> Tensor:
        """The tokens emitted this round, shape (B, K). Row b emits its first ``num_accepted + 1``;
        the rest is arbitrary."""
        if draft.num_nodes == 1:
            return self.next_token_B[:, None]
        if draft.is_chain:  # every accepted path is a prefix of the chain
            tokens_BD = draft.tokens_BN[:, 1:]
        else:
            tokens_BD = draft.tokens_BN.gather(1, self.path_BD)
        next_B1 = self.next_token_B[:, None]
        emitted_BK = torch.cat([tokens_BD, next_B1], 1)
        return emitted_BK.scatter_(1, self.num_accepted_B[:, None], next_B1)


@dataclass(frozen=True)
class Acceptance(Verdict):
    """A verdict whose counts the host knows too. :meth:`Verdict.read` makes it.

    Attributes:
        num_accepted: length of each row's accepted path.
        num_emitted: the same plus one: the tokens that each row emits, and what a cache keeps of
            the draft, which is the root and the accepted path.
    """

    num_accepted: Lengths
    num_emitted: Lengths
