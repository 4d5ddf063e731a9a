"""Beams: how the best continuations are taken, and the tree in which beams share a cache.

The beams of a search are the deepest nodes of one tree after a row's committed slots. A forward
pass feeds the last tokens of all beams as its query tokens. When a beam dies or branches, nothing
in the cache is copied or re-ordered: the mask of each beam shows its own path, whatever slots the
path is in.

Legend: B rows, n beams, k kept, C continuations (n·V), R draws, K tokens on a beam's path, M nodes
of the tree, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from outrider.core import Context, Prefix
from outrider.drafters.tree.children import without_replacement
from outrider.runtime import Nodes


@dataclass(frozen=True)
class BeamTree:
    """Beams as the deepest nodes of a tree after the committed slots, level by level.

    Attributes:
        tokens_BM: tokens of all nodes, dead beams included.
        path_BnK: the nodes on each living beam's path, its own node last.
        depth_M: levels above each node.
    """

    tokens_BM: Tensor
    path_BnK: Tensor
    depth_M: Tensor

    @classmethod
    def root(cls, tokens_BT: Tensor, num_beams: int = 1) -> "BeamTree":
        """Beams that have no tokens yet, after some committed ones, of which only the number of
        rows counts."""
        none_B0 = tokens_BT[:, :0]
        return cls(none_B0, none_B0[:, None].expand(-1, num_beams, -1), none_B0[0])

    def grown(self, beam_Bn: Tensor, token_Bn: Tensor) -> "BeamTree":
        """The tree with one token after each of these beams. A beam may be named several times,
        or not at all, which ends it."""
        (B, n), M = beam_Bn.shape, self.tokens_BM.shape[1]
        above_BnK = self.path_BnK.gather(
            1, beam_Bn[..., None].expand(-1, -1, self.path_BnK.shape[2])
        )
        own_n1 = torch.arange(M, M + n, device=token_Bn.device)[:, None]
        return BeamTree(
            torch.cat([self.tokens_BM, token_Bn], 1),
            torch.cat([above_BnK, own_n1.expand(B, n, 1)], 2),
            torch.cat([self.depth_M, self.depth_M.new_full((n,), above_BnK.shape[2])]),
        )

    @property
    def last_Bn(self) -> Tensor:
        """The living beams' last tokens."""
        return self.tokens_BM[:, self.tokens_BM.shape[1] - self.path_BnK.shape[1] :]

    @property
    def above_Bn(self) -> Tensor:
        """The parents of the living beams' own nodes, numbered from 1 on; 0 is the root."""
        if self.path_BnK.shape[2] == 1:
            return torch.zeros_like(self.path_BnK[:, :, 0])
        return self.path_BnK[:, :, -2] + 1

    @cached_property
    def on_path_BnM(self) -> Tensor:
        """Whether each node is on each living beam's path."""
        B, n, _ = self.path_BnK.shape
        nowhere_BnM = torch.zeros(
            B, n, self.tokens_BM.shape[1], dtype=torch.bool, device=self.tokens_BM.device
        )
        return nowhere_BnM.scatter_(2, self.path_BnK, True)

    @property
    def nodes(self) -> Nodes:
        """The living beams as the query tokens of the next forward pass."""
        return Nodes(self.on_path_BnM, self.depth_M.expand_as(self.tokens_BM))

    def packed(self) -> tuple["BeamTree", Tensor]:
        """The tree of a single row without the nodes that are on no living beam's path, and the
        former numbers of the other nodes, in order."""
        lives_M = self.on_path_BnM[0].any(0)
        old_M = lives_M.nonzero()[:, 0]
        new_M = lives_M.cumsum(0) - 1
        tree = BeamTree(self.tokens_BM[:, old_M], new_M[self.path_BnK], self.depth_M[old_M])
        return tree, old_M

    def prefix(self, context: Context, score_Bn: Tensor) -> Prefix:
        """What precedes the token after each living beam. A beam of score -inf does not exist."""
        return Prefix(
            context,
            lambda: self.tokens_BM,
            lambda: self.on_path_BnM,
            lambda: score_Bn > -torch.inf,
        )


def best(score_Bn: Tensor, log_q_BnV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best continuations, best first: their scores, and beam · V + token."""
    n, V = log_q_BnV.shape[1:]
    top_Bnk, token_Bnk = log_q_BnV.topk(min(k, V))  # no beam has more among the best k
    index_Bnk = torch.arange(n, device=token_Bnk.device)[:, None] * V + token_Bnk
    score_BC = (score_Bn[..., None] + top_Bnk).flatten(1)
    score_Bk, place_Bk = score_BC.topk(min(k, score_BC.shape[1]))
    return score_Bk, index_Bnk.flatten(1).gather(1, place_Bk)


def sampled(score_Bn: Tensor, q_BnV: Tensor, k: int, u_BR: Tensor) -> tuple[Tensor, Tensor]:
    """The k best of R draws without replacement, with probabilities ∝ exp(score); returns what
    :func:`best` does.

    Takes one random number per draw, where Gumbel noise would take one per continuation; the
    distribution is the same.
    """
    weight_Bn = (score_Bn - score_Bn.amax(1, keepdim=True)).exp()
    weight_B1C = (weight_Bn[..., None] * q_BnV).flatten(1)[:, None]
    u_B1R = u_BR[:, None, : weight_B1C.shape[2]]
    index_BR, exists_BR = (x_B1R[:, 0] for x_B1R in without_replacement(weight_B1C, u_B1R))
    q_BR = q_BnV.flatten(1).gather(1, index_BR).to(score_Bn.dtype)
    score_BR = score_Bn.gather(1, index_BR // q_BnV.shape[2]) + q_BR.log()
    score_BR = score_BR.where(exists_BR, -torch.inf)
    score_Bk, place_Bk = score_BR.topk(min(k, score_BR.shape[1]))
    return score_Bk, index_BR.gather(1, place_Bk)
