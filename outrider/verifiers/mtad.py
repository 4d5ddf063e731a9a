"""MTAD on a tree: accepts the deepest prefix of any beam that is jointly likely under the target.

Qin, He, Hu, Prakriya, Cong and Sun, "Optimized Multi-Token Joint Decoding with Auxiliary Model for
LLM Inference", ICLR 2025, in the multi-candidate form of the authors' code (April 2025). Let P and
Q be the products of p and q along the path to a node, and Q* the largest Q at the node's depth:

    a node passes iff   min(1, P / Q*) > τ
    at the greatest depth with a node that passes, accept the passing node with the largest P
    then draw one token from p at that node

Q* is the probability of the best beam, so a beam with a lower draft probability must reach the same
target probability as the best beam. As in ``Joint``, a depth at which no node passes does not
exclude deeper ones, and the next token is drawn from the full target distribution. On a chain the
two rules are equal.

Departure from the authors' code: the ratio is capped at 1, as in the rule for chains, so that
τ >= 1 accepts nothing; for τ < 1 this changes nothing.

Preserves: P > τ Q for every accepted prefix as a whole. Nothing is bounded per token. Accepts
trees and chains, searched or i.i.d.

Legend: B rows, N nodes, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import Bound, Draft, Drawn, Needs, Role, Stream, Verdict, draw, path_to
from outrider.verifiers.joint import check_tau, passes, path_logs


@dataclass(frozen=True)
class Mtad:
    """Joint verification of a tree of beams (MTAD).

    Attributes:
        tau: τ, the lower limit, exclusive, of the ratio of a path's target probability to the
            largest draft probability at its depth.

    Raises:
        InvalidParameterError: τ is negative or not finite.
    """

    tau: float = 0.5
    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "searched"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_tau(self.tau)

    @property
    def bound(self) -> Bound:
        words = f"P > {self.tau:g} Q for the accepted tokens as a whole, nothing per token"
        return Bound(words, threshold=self.tau)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of trees."""
        log_P_BN, log_Q_BN = path_logs(draft, p_BNV)
        log_ratio_BN = log_P_BN - self.best_of_depth(draft, log_Q_BN)
        good_BN = draft.mask_BN & passes(log_ratio_BN, self.tau)
        good_BN[:, 0].fill_(True)  # the empty prefix

        depth_BN = torch.where(good_BN, draft.depth_BN, -1)
        deepest_B1 = depth_BN.amax(1, keepdim=True)
        score_BN = torch.where(depth_BN == deepest_B1, log_P_BN, -math.inf)
        node_B = score_BN.argmax(1)

        rows_B = torch.arange(node_B.shape[0], device=p_BNV.device)
        next_B = draw(p_BNV[rows_B, node_B], rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(path_to(draft, node_B), deepest_B1[:, 0], next_B)

    def best_of_depth(self, draft: Draft, log_Q_BN: Tensor) -> Tensor:
        """log Q* at each node, (B, N): the largest log Q among the nodes of the same depth."""
        known_BN = draft.mask_BN & ~log_Q_BN.isnan()  # q after an end token is arbitrary
        log_Q_BN = torch.where(known_BN, log_Q_BN, -math.inf)
        best_BN = torch.full_like(log_Q_BN, -math.inf)
        best_BN.scatter_reduce_(1, draft.depth_BN.clamp(min=0), log_Q_BN, "amax")
        return best_BN.gather(1, draft.depth_BN.clamp(min=0))
