"""Typical acceptance: accepts a drafted token unless it is atypical under the target.

Cai, Li, Geng, Peng, Lee, Chen and Dao, "Medusa: Simple LLM Inference Acceleration Framework with
Multiple Decoding Heads", ICML 2024, section 2.3.1; the threshold is that of truncation sampling
(Hewitt, Manning and Liang, 2022).

    accept x   iff   p(x) > min(ε, δ exp(-H(p))),   H(p) = -Σ p ln p
    after a rejection or a fully accepted draft:   draw from p     emit="sample"
                                                   take argmax p   emit="argmax"

The authors set ε = 0.09 and δ = 0.3 = √ε. Their entropy is -Σ p ln(p + 1e-5), which is smaller by
up to 1e-5 per token of the vocabulary; here it is exact, with 0 ln 0 = 0. In their fast mode the
token after the accepted path is the argmax at any temperature; ``emit="argmax"`` reproduces this
for comparison with their results. With ``emit="sample"`` the output distribution is
π = q r + (1 - Σ q r) p, with r the 0 or 1 of the rule.

Of a tree, the longest path of accepted tokens is kept, of equally long ones the one of largest
Π p, as the authors' code does; the siblings of a rejected token count as if it were not there.

Since H(p) >= -ln max p, the most probable token is accepted whenever δ < 1. A point mass
(temperature 0) has H = 0: its token is accepted if min(ε, δ) < 1, and no other token ever is. ε = 0
or δ = 0 accepts every token with p(x) > 0.

Preserves: a threshold on each accepted token; no divergence is bounded. Accepts chains and trees,
i.i.d. or chosen.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary; leading dimensions broadcast.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import (
    Bound,
    Draft,
    Drawn,
    Needs,
    Role,
    Stream,
    Verdict,
    draw,
    match,
    path_to,
    walk,
)
from outrider.core.errors import InvalidParameterError

Emit = Literal["sample", "argmax"]


@dataclass(frozen=True)
class Typical:
    """Acceptance above a threshold that falls with the target's entropy (Cai et al.).

    Attributes:
        epsilon: ε, the highest threshold, in [0, 1].
        delta: δ, the factor of ``exp(-H)`` in the threshold, 0 or greater; with infinity the
            threshold is ε.
        emit: how the token after the accepted path is chosen: ``sample`` or ``argmax``.

    Raises:
        InvalidParameterError: a parameter lies outside its domain.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    emit: Emit = "sample"

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise InvalidParameterError(
                f"epsilon={self.epsilon!r}: must be in [0, 1]; 0 accepts every possible token"
            )
        if not self.delta >= 0:
            raise InvalidParameterError(
                f"delta={self.delta!r}: must be 0 or greater (inf: the threshold is epsilon)"
            )
        if self.emit not in ("sample", "argmax"):
            raise InvalidParameterError(f"emit={self.emit!r}: must be 'sample' or 'argmax'")

    @property
    def bound(self) -> Bound:
        words = f"every accepted token has p > min({self.epsilon:g}, {self.delta:g} exp(-H(p)))"
        return Bound(words, threshold=self.epsilon)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        if not draft.is_chain:
            return self._longest(draft, p_BNV, rng)
        if self.emit == "sample":
            return walk(self, draft, p_BNV, rng)
        x_BD = draft.tokens_BN[:, 1:]
        return match(draft, self._typical(p_BNV[:, :-1], x_BD), p_BNV.argmax(-1))

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """Whether x is typical, independently of u."""
        return self._typical(p_V, x)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """1 for typical tokens, else 0."""
        return (p_V > self._threshold(p_V)).to(p_V.dtype)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The full target distribution, not a residual; or the point mass at its argmax."""
        if self.emit == "sample":
            return p_V, q_V
        argmax_1 = p_V.argmax(-1, keepdim=True)
        return torch.zeros_like(p_V).scatter(-1, argmax_1, 1.0), q_V

    def _longest(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Keeps the longest path of typical tokens of a tree."""
        rows_B1 = torch.arange(p_BNV.shape[0], device=p_BNV.device)[:, None]
        x_BD, above_BDV = draft.tokens_BN[:, 1:], p_BNV[rows_B1, draft.parents_BN[:, 1:]]
        passes_BN = draft.mask_BN & pad(self._typical(above_BDV, x_BD), (1, 0), value=True)
        log_p_BN = pad(above_BDV.gather(2, x_BD[..., None])[..., 0].log(), (1, 0))
        ancestors_BNN = draft.ancestors_BNN
        reached_BN = (passes_BN[:, None] | ~ancestors_BNN).all(2)
        depth_BN = torch.where(reached_BN, draft.depth_BN, -1)
        most_B = depth_BN.amax(1)
        product_BN = torch.where(ancestors_BNN, log_p_BN[:, None], 0.0).sum(2)
        longest_BN = depth_BN == most_B[:, None]
        node_B = product_BN.masked_fill(~longest_BN, -torch.inf).argmax(1)
        p_BV = p_BNV[rows_B1[:, 0], node_B]
        if self.emit == "argmax":
            next_B = p_BV.argmax(-1)
        else:
            next_B = draw(p_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(path_to(draft, node_B), most_B, next_B)

    def _typical(self, p_V: Tensor, x: Tensor) -> Tensor:
        return (p_V.gather(-1, x[..., None]) > self._threshold(p_V))[..., 0]

    def _threshold(self, p_V: Tensor) -> Tensor:
        """``min(ε, δ exp(-H))``; the last dimension has size one."""
        entropy: Tensor = torch.special.entr(p_V).sum(-1, keepdim=True)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
