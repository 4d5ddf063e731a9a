"""TEMPLATE for ``outrider/verifiers/<name>.py``: fill in the angle brackets, delete this line.

<Name of the rule>: <what it does, in one sentence>.

<Authors>, "<Title>", <venue and year>, <algorithm or equation number>, <link>. <If the paper swaps
p and q, say so.> <Where this file departs from the authors' code, and why.>

    accept x ~ q   iff   u q(x) < s min(p(x), q(x))
    else           p <- norm(p - s min(p, q))

<Why it preserves what it preserves, in a line or two. This example, a shy rejection sampler, shows
the argument. For any acceptance probability a(x) <= min(1, p(x)/q(x)), token x is emitted as an
accepted draft with probability q(x) a(x), so the residual must supply p - q a. s = 1 is
``Rejection``.>

Preserves: the target's distribution, exactly. Accepts i.i.d. and chosen drafts.

Legend: V vocabulary; leading dimensions broadcast.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import LOSSLESS, Bound, Draft, Drawn, Needs, Stream, Verdict, walk


@dataclass(frozen=True)
class Shy:
    """<One line.> Configuration is bound here; each call gets only the draft, p and the rng.

    Attributes:
        shyness: the s of the equations, in (0, 1].
        lossless: a claim that the test kit proves. A lossy rule sets False and documents its bound.
        accepts: the kinds of draft for which the rule is proved. Any other kind would give
            *silently* wrong output; this attribute turns it into an error.
        needs: ``"distribution"``; ``"argmax"`` if the rule uses only the argmax of p; ``"logits"``
            if it is for temperature 0 and uses the logits themselves.
        traceable: whether the code can be traced: it reads no tensor's value (no
            ``bool(tensor)``; a loop until a tensor says so is ``core.repeat_while``) and draws with
            ``rng.uniform`` or ``race`` only. Compiled engines then compile the rule as well. Leave
            it out if not, or if in doubt. With ``by_node = True`` besides, each shape of trees has
            a program of its own, and the code may loop over ``draft.parents``. With ``verify_at``
            (``core.ReadsNodes``) a program computes only the distributions that a tree needs. With
            ``walks = False`` (all nodes are compared at once) trees may have many siblings.
        bound: what is preserved: ``LOSSLESS``, or a property that computes a ``Bound``.
    """

    shyness: float = 0.5
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True
    bound: ClassVar[Bound] = LOSSLESS

    def __post_init__(self) -> None:
        if not 0 < self.shyness <= 1:
            raise ValueError(f"shyness must be in (0, 1], got {self.shyness}")

    # A rule that verifies one candidate at a time defines `accept` and `reject`; `walk` applies it
    # to batches, chains and trees. A rule that verifies a path as a whole (block verification, a
    # joint threshold) omits both and computes the Verdict here.

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        return walk(self, draft, p_BNV, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """Whether x is accepted. Strict ``<``: u can be 0, and p(x) = 0 must never be accepted."""
        p_x = p_V.gather(-1, x[..., None])[..., 0]
        if q_V is None:  # chosen, not drawn: q is the point mass at x
            return u < self.shyness * p_x
        q_x = q_V.gather(-1, x[..., None])[..., 0]
        return u * q_x < self.shyness * torch.minimum(p_x, q_x)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """The probability of acceptance, for every token. Optional: the test kit, the statistics
        and ``outrider certify`` use it to compute the emitted distribution in closed form."""
        return self.shyness * torch.where(q_V > p_V, p_V / q_V, 1.0)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual distribution after a rejection, unnormalised, and the next sibling's q."""
        if q_V is None:
            x_1 = x[..., None]
            return p_V.scatter(-1, x_1, (1 - self.shyness) * p_V.gather(-1, x_1)), None
        return p_V - self.shyness * torch.minimum(p_V, q_V), q_V
