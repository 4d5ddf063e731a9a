"""The nouns that travel between drafter, verifier and commit.

Legend: B rows (sequences), N nodes of a draft tree (node 0 is the root), D depth, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from outrider.core.chain import full_chains
from outrider.core.columns import Columns
from outrider.core.lengths import Lengths

Drawn = Literal["iid", "distinct", "chosen", "searched"]


@dataclass(frozen=True)
class Draft:
    """A batch of token trees in topological order; a chain is a thin tree.

    Node 0 is the root: the last committed token, which the target has not cached yet.

    Attributes:
        tokens_BN: token of each node.
        parents_BN: parent of each node; ``parents[b, i] < i`` and ``parents[b, 0] = -1``.
        mask_BN: which nodes exist; a parent of an existing node exists, and the root always does.
        probs_BNV: row i is the distribution that the children of node i were drawn from (if
            searched: the draft's distribution there); None iff ``drawn == "chosen"``, or a search
                has no distributions to show.
        drawn: how siblings came about: independent draws (``iid``, in draw order), draws without
            replacement (``distinct``, in draw order), picked by a deterministic rule
            (``chosen``), or found by a search over the draft's distributions, such as beams
            (``searched``). What a search finds is neither a draw from those distributions nor a
            point mass, so a rule that preserves the target's distribution by way of q cannot verify
            it.
        is_chain: every node's parent is the node before it (known without a look at the device).
        logits_BNV: the draft model's own logits behind each node, before temperature and
            truncation; None unless the rule reads them.
        step_probs_BN: of a search, the share of each token's path in what its step chose from: all
            continuations of all beams; 1 at the root. None from other drafters.
        drawn_probs_BN: of chosen tokens that were drawn all the same, by noise that the rule
            shares: the draft's probability of each behind its parent, for the statistics; arbitrary
            at the root. None from other drafters.
        longest_walk: most nodes that a walk from the root down may come to, rejected siblings
            included, where whoever drafted knows it without a look at the device.
        is_full: it is a chain all of whose nodes are known to exist, without a look at the device;
            said by :meth:`chain`, not by a draft that was changed since.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    mask_BN: Tensor
    probs_BNV: Tensor | None
    drawn: Drawn
    is_chain: bool = False
    logits_BNV: Tensor | None = None
    step_probs_BN: Tensor | None = None
    longest_walk: int | None = None
    drawn_probs_BN: Tensor | None = None
    is_full: bool = field(default=False, init=False)

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
        """A batch of chains: node i follows node i-1. Shapes as in the class; no mask means that
        all nodes exist."""
        full = full_chains(tokens_BN)
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
        object.__setattr__(draft, "is_full", mask_BN is None)  # so that no copy inherits it
        return draft

    @classmethod
    def root_only(cls, root_B: Tensor) -> "Draft":
        """The empty draft: plain decoding is a round with this."""
        return cls.chain(root_B[:, None], None, None, "chosen")

    @property
    def num_nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @cached_property
    def num_drafted_B(self) -> Tensor:
        """Drafted tokens per row, root excluded."""
        if self.is_full:
            return full_chains(self.tokens_BN).num_drafted_B
        return self.mask_BN.sum(1) - 1

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """``[b, i, j]`` is true iff j is i or an ancestor of i."""
        B, N = self.tokens_BN.shape
        eye_NN = torch.eye(N, dtype=torch.bool, device=self.tokens_BN.device)
        if self.is_chain:
            return torch.ones_like(eye_NN).tril().expand(B, N, N)
        ancestors_BNN = eye_NN.expand(B, N, N)
        above_BN = self.parents_BN.clamp(min=0)
        for _ in range(self.most_verified.bit_length()):  # each round doubles how far up it sees
            ancestors_BNN = ancestors_BNN | ancestors_BNN.gather(
                1, above_BN[..., None].expand(B, N, N)
            )
            above_BN = above_BN.gather(1, above_BN)
        return ancestors_BNN

    @cached_property
    def depth_BN(self) -> Tensor:
        """Edges between each node and the root."""
        if self.is_chain:
            return full_chains(self.tokens_BN).depth_BN
        return self.ancestors_BNN.sum(2) - 1

    @property
    def most_verified(self) -> int:
        """Most nodes that a walk from the root down may come to, as far as the host knows."""
        return self.num_nodes - 1 if self.longest_walk is None else self.longest_walk

    @cached_property
    def visit_order_BN(self) -> Tensor:
        """When a walk from the root down may come to each node: after its ancestors and what
        stands before them and before it among their siblings. 0 for the root, then from 1 on.

        Nodes with the same turn have different parents.
        """
        number_N = torch.arange(self.num_nodes, device=self.tokens_BN.device)
        is_sibling_BNN = self.parents_BN[:, :, None] == self.parents_BN[:, None]
        rank_BN = (is_sibling_BNN & (number_N[:, None] >= number_N)).sum(2)
        return torch.where(self.ancestors_BNN, rank_BN[:, None], 0).sum(2) - 1

    @cached_property
    def columns(self) -> Columns:
        """The columns of the target's pass."""
        return Columns.of(self)


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided.

    Attributes:
        path_BD: accepted nodes from the root's child downwards; entries from ``num_accepted``
            on are arbitrary but valid node numbers.
        num_accepted_B: length of the accepted path.
        next_token_B: the one token emitted after the path: correction, bonus, or plain sample.
    """

    path_BD: Tensor
    num_accepted_B: Tensor
    next_token_B: Tensor

    @cached_property
    def num_emitted_B(self) -> Tensor:
        """The accepted tokens and the next one."""
        return self.num_accepted_B + 1

    def read(self, num_accepted: Sequence[int] | None = None) -> "Acceptance":
        """The verdict with its counts on the host, as ``commit`` takes it.

        Args:
            num_accepted: the counts, where the caller has read them; None reads them here, which
                waits for the device.
        """
        host = self.num_accepted_B.tolist() if num_accepted is None else list(num_accepted)
        accepted = Lengths(host, self.num_accepted_B)
        emitted = Lengths([n + 1 for n in host], self.num_emitted_B)
        return Acceptance(self.path_BD, self.num_accepted_B, self.next_token_B, accepted, emitted)

    def emitted(self, draft: Draft) -> Tensor:
        """Tokens emitted this round, shape (B, D+1); row b's first ``num_accepted + 1`` count."""
        if draft.is_chain:  # one path, whatever was accepted of it
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
