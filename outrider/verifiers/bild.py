"""BiLD's rollback policy: draft tokens are kept until the target finds one of them too unlikely.

Kim, Mangalam, Moon, Malik, Mahoney, Gholami and Keutzer, "Speculative Decoding with Big Little
Decoder", NeurIPS 2023, section 3.3 (rollback policy). The fallback policy of section 3.2, which
decides when to call the large model, is part of the drafter (``drafters/chain/bild.py``).

    roll back to the first y_i with  -log p(y_i) > α_RB  and  y_i != argmax p;  emit argmax p there
    if there is none, emit argmax p after the last drafted token

``mode="original"`` decodes greedily with both models, at temperature 0 only; p is the softmax of
the raw logits. ``mode="mjsd"`` is the baseline of Qin et al., "Multi-Token Joint Speculative
Decoding", 2024: tokens are sampled from the warped distributions; p is the warped distribution, so
-log p is infinite outside its support; and the large model's token is drawn from p. In the authors'
code a threshold of 0 silently becomes the default (``x or default``); here 0 means 0.

Preserves: every kept draft token has -log p <= α_RB (or is the argmax, in the original mode); no
divergence is bounded. Accepts chains, i.i.d. or chosen.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from outrider.core import (
    Bound,
    Draft,
    Drawn,
    Needs,
    Stream,
    Verdict,
    candidates_equal,
    match,
    require_chain,
    walk,
)
from outrider.core.errors import InvalidParameterError

Mode = Literal["original", "mjsd"]


@dataclass(frozen=True)
class Bild:
    """Rollback at the first token that is too unlikely under the target (Kim et al.).

    Attributes:
        rollback: α_RB in nats, 0 or greater; infinity means never to roll back.
        mode: ``original`` (greedy, raw logits) or ``mjsd`` (sampled, warped distributions).

    Raises:
        InvalidParameterError: a threshold below 0, or an unknown mode.
    """

    rollback: float = 5.0
    mode: Mode = "original"

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.rollback >= 0:
            raise InvalidParameterError(
                f"rollback={self.rollback!r}: must be a number of nats, 0 or greater (inf: never)"
            )
        if self.mode not in ("original", "mjsd"):
            raise InvalidParameterError(f"mode={self.mode!r}: must be 'original' or 'mjsd'")

    @property
    def needs(self) -> Needs:
        return "logits" if self.mode == "original" else "distribution"

    @property
    def bound(self) -> Bound:
        words = f"every kept token has -log p <= {self.rollback:g} under the target"
        return Bound(words, threshold=self.rollback)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        require_chain(self, draft)
        if self.mode == "mjsd":
            return walk(self, draft, p_BNV, rng)
        argmax_BN = p_BNV.argmax(-1)
        x_BD1 = draft.tokens_BN[:, 1:, None]
        z_BDV = p_BNV[:, :-1]
        surprisal_BD = z_BDV.logsumexp(-1) - z_BDV.gather(2, x_BD1)[..., 0]
        fits_BD = (surprisal_BD <= self.rollback) | candidates_equal(draft, argmax_BN)
        return match(draft, fits_BD, argmax_BN)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """``-log p(x) <= α_RB``, independently of u."""
        return p_V.gather(-1, x[..., None])[..., 0] >= math.exp(-self.rollback)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return (p_V >= math.exp(-self.rollback)).to(p_V.dtype)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The full target distribution, not a residual."""
        return p_V, q_V
