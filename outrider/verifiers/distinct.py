"""Rejection sampling over siblings drawn without replacement.

Yang, Huang, Dai and Chen, "Multi-Candidate Speculative Decoding", 2024; Chen, May, Svirschevski,
Huang, Ryabinin, Jia and Chen, "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding",
2024, Algorithm 2. For each child c of a node, in draw order:

    accept c   iff   u q(c) < p(c)
    else       p <- norm(max(p - q, 0)),   q(c) <- 0,   q <- norm(q)
    if q has no mass left:   q <- the uniform distribution over the tokens not rejected yet

The update of p is that of speculative sampling. The update of q makes q the distribution of the
next draw. The last line is Sequoia's cover property: the draft may have more children than q has
tokens in its support, and if every token is a child, one of them is always accepted. For a drafter
that stops where its distribution has no mass left, the rule is valid too: it never reaches that
line.

A rejected c has p(c) < q(c), so the residual has no mass at c, and a second independent draw of c
would be wasted: the mass that q has there is better spent on other tokens. Therefore two distinct
siblings are accepted at least as often as two independent ones under ``Rejection``.

Departure from the authors' code: Sequoia draws by the top k of ``log(u)/q`` and ends the generation
if a residual has no mass; here ``walk`` continues with the target distribution.

Preserves: the target distribution exactly. Accepts distinct drafts, and chosen ones: there q is the
point mass at each sibling, as in ``Rejection``. Independent draws, which are distinct only where
every node has one child, need ``Rejection``.

Legend: B rows, N nodes, V vocabulary; leading dimensions broadcast.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import (
    LOSSLESS,
    Bound,
    Draft,
    Drawn,
    Needs,
    NodeDistributions,
    Stream,
    Verdict,
    walk,
    walk_down,
)
from outrider.core.recording import is_recorded
from outrider.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Distinct:
    """Multi-step rejection over siblings drawn without replacement (MCSD, Sequoia)."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"distinct", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        return walk(self, draft, p_BNV, rng)

    def verify_at(self, draft: Draft, p_at: NodeDistributions, rng: Stream) -> Verdict:
        """As ``ReadsNodes``: a walk reads the nodes that it descends to."""
        return walk_down(self, draft, p_at, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """``u q(x) < p(x)``, strictly; q is the distribution of x without its earlier siblings."""
        return Rejection().accept(p_V, q_V, x, u)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """``min(1, p/q)``, for the first sibling."""
        return Rejection().acceptance(p_V, q_V)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual ``max(p - q, 0)``, unnormalised, and the next sibling's distribution."""
        left_V, _ = Rejection().reject(p_V, q_V, x)
        return left_V, None if q_V is None else without(q_V, x)


def without(q_V: Tensor, x: Tensor) -> Tensor:
    """q without x, renormalised. If no mass is left: uniform over the tokens not rejected yet.

    The weight of a rejected token becomes -0.0, which adds and compares like zero. Its sign
    distinguishes the token from those that had no mass in q to begin with, which the uniform
    distribution includes.
    """
    left_V = q_V.scatter(-1, x[..., None], -0.0)
    mass = left_V.sum(-1, keepdim=True)
    synchronises = mass.device.type == "cpu" and not is_recorded()
    if synchronises and (mass > 0).all():  # elsewhere reading a number costs more
        return left_V / mass
    open_V = ~left_V.signbit()
    cover_V = torch.where(open_V, 1 / open_V.sum(-1, keepdim=True, dtype=q_V.dtype), left_V)
    return torch.where(mass > 0, left_V / mass, cover_V)
