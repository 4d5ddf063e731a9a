"""Relaxed acceptance: keep a drafted token that is nearly as probable as the target's best.

TensorRT-LLM's rule for the thinking phase of DeepSeek-R1 (``use_relaxed_acceptance_for_thinking``,
``relaxed_topk``, ``relaxed_delta``): "DeepSeek R1 MTP Implementation and Optimization", NVIDIA,
2025; its example sets 10 and 0.6.

    accept x   iff   x is among the k most probable tokens of p   and   p(x) >= max p - δ
    rejected    the target's own token

Theirs decodes greedily, by the softmax of the logits, and the target's token is the argmax:
:class:`RelaxedGreedy`. :class:`Relaxed` carries the rule over to sampling: p is the warped
distribution, and the target's token a draw from it, so that the place emits π = q r + (1 - Σ q r) p
with r the 0 or 1 of the rule. Their kernel takes exactly k tokens, ties broken by the sort; here
all tokens as probable as the k-th count. A token with p(x) = 0 is never accepted. Switching the
rule on only between the tokens that open and close the thinking is left out.

Preserves: a threshold on each accepted token, no divergence. Accepts chains, i.i.d. or chosen.

Legend: B rows, N nodes, D candidates (N-1), V vocabulary; leading dimensions broadcast.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider.core import (
    Bound,
    Draft,
    Drawn,
    Needs,
    Stream,
    Verdict,
    match,
    require_chain,
    walk,
)
from outrider.core.errors import InvalidParameterError


@dataclass(frozen=True)
class Relaxed:
    """Acceptance near the top of the warped distribution; what is rejected is drawn anew.

    Attributes:
        top_k: k, a whole number of at least 1; 1 accepts the argmax only.
        delta: δ, how far below the best probability, in [0, 1]; 0 accepts the argmax only.

    Raises:
        InvalidParameterError: a parameter outside its domain.
    """

    top_k: int = 10
    delta: float = 0.6

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.top_k, self.delta)

    @property
    def bound(self) -> Bound:
        return _bound(self.top_k, self.delta)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        require_chain(self, draft)
        return walk(self, draft, p_BNV, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """Whether x is near the top, whatever u."""
        return _near_the_top(p_V, x, self.top_k, self.delta)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """1 near the top, else 0."""
        top_K = p_V.topk(min(self.top_k, p_V.shape[-1])).values
        near_V = (p_V >= top_K[..., :1] - self.delta) & (p_V >= top_K[..., -1:]) & (p_V > 0)
        return near_V.to(p_V.dtype)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The target's whole distribution, not a residual."""
        return p_V, q_V


@dataclass(frozen=True)
class RelaxedGreedy:
    """Acceptance near the top of the softmax of the logits, at temperature 0 (TensorRT-LLM).

    Attributes and errors as in :class:`Relaxed`.
    """

    top_k: int = 10
    delta: float = 0.6

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "logits"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.top_k, self.delta)

    @property
    def bound(self) -> Bound:
        return _bound(self.top_k, self.delta)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """``p`` holds the target's logits."""
        require_chain(self, draft)
        p_BDV = p_BNV[:, :-1].softmax(-1)
        near_BD = _near_the_top(p_BDV, draft.tokens_BN[:, 1:], self.top_k, self.delta)
        return match(draft, near_BD, p_BNV.argmax(-1))


def _near_the_top(p_V: Tensor, x: Tensor, top_k: int, delta: float) -> Tensor:
    """The rule. Counts the tokens above x; nothing is sorted."""
    p_x1 = p_V.gather(-1, x[..., None])
    near_x1 = (p_x1 >= p_V.amax(-1, keepdim=True) - delta) & (p_x1 > 0)
    return near_x1[..., 0] & ((p_V > p_x1).sum(-1) < top_k)


def _bound(top_k: int, delta: float) -> Bound:
    words = f"every accepted token has p >= max p - {delta:g} and is among the {top_k} best"
    return Bound(words, threshold=delta)


def _check(top_k: int, delta: float) -> None:
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise InvalidParameterError(f"top_k={top_k!r}: must be a whole number, 1 or greater")
    if not 0 <= delta <= 1:
        raise InvalidParameterError(f"delta={delta!r}: must be in [0, 1]; 0 accepts argmaxes only")
