"""Relaxed acceptance: accepts a drafted token nearly as probable as the target's argmax.

TensorRT-LLM's rule for the thinking phase of DeepSeek-R1 (``use_relaxed_acceptance_for_thinking``,
``relaxed_topk``, ``relaxed_delta``): "DeepSeek R1 MTP Implementation and Optimization", NVIDIA,
2025, which sets k = 10 and δ = 0.6 in its example.

    accept x   iff   x is among the k most probable tokens of p   and   p(x) >= max p - δ
    else       emit the target's own token

TensorRT-LLM decodes greedily: p is the softmax of the logits, and the target's token is the argmax.
That is :class:`RelaxedGreedy`. :class:`Relaxed` extends the rule to sampling: p is the warped
distribution and the target's token is drawn from it, so the output distribution is
π = q r + (1 - Σ q r) p, with r the 0 or 1 of the rule. Their kernel takes exactly k tokens, with
ties broken by the sort; here every token as probable as the k-th counts. A token with p(x) = 0 is
never accepted. Their option to apply the rule only between the tokens that begin and end the
thinking phase is not implemented.

Preserves: a threshold on each accepted token; no divergence is bounded. Accepts chains, i.i.d. or
chosen.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary, Z most probable tokens; leading
dimensions broadcast.
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
    """Accepts tokens near the top of the warped distribution; otherwise draws from it.

    Attributes:
        top_k: k, a whole number of at least 1; 1 accepts only the argmax.
        delta: δ, the allowed distance below the largest probability, in [0, 1]; 0 accepts only the
            argmax.

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
        """Whether x is near the top of p, independently of u."""
        return _near_the_top(p_V, x, self.top_k, self.delta)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """1 for tokens near the top of p, else 0."""
        top_Z = p_V.topk(min(self.top_k, p_V.shape[-1])).values
        near_V = (p_V >= top_Z[..., :1] - self.delta) & (p_V >= top_Z[..., -1:]) & (p_V > 0)
        return near_V.to(p_V.dtype)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The full target distribution, not a residual."""
        return p_V, q_V


@dataclass(frozen=True)
class RelaxedGreedy:
    """Accepts tokens near the top of the softmax of the logits, at temperature 0 (TensorRT-LLM).

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
        """Verifies a batch of chains; ``p_BNV`` holds the target's logits."""
        require_chain(self, draft)
        p_BDV = p_BNV[:, :-1].softmax(-1)
        near_BD = _near_the_top(p_BDV, draft.tokens_BN[:, 1:], self.top_k, self.delta)
        return match(draft, near_BD, p_BNV.argmax(-1))


def _near_the_top(p_V: Tensor, x: Tensor, top_k: int, delta: float) -> Tensor:
    """Whether x meets the rule. Counts the tokens more probable than x instead of sorting."""
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
