"""Drafts from fixed random distributions: what an engine does when nearly all tokens are rejected.

An instrument, not a method. No draft model runs, so what a round takes beyond a plain one is the
time of drawing and verifying. Every branch of a rejection is exercised, at any vocabulary size.

    uniform   q(x) = 1 / V
    random    q = softmax(spread · z),  z normal: one of a few fixed ones, by position

With spread 0 the second is the first. The distributions depend neither on the context nor on the
sampling parameters.

Proposes: i.i.d. chains.

Legend: B rows, N nodes (node 0 is the root), D drafted tokens (N-1), E distributions, V vocabulary.
"""

import math

import torch

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Role,
    Scores,
    Stream,
    draw,
)
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.none import NoState

NUM_DISTRIBUTIONS = 16


class RandomDrafter:
    """Draws tokens from fixed random distributions.

    Args:
        num_tokens: width of the target's logits.
        spread: standard deviation of the distributions' logits; 0 makes them uniform.
        seed: of the distributions.
        dtype: of the distributions.

    Raises:
        InvalidParameterError: a negative or infinite spread.
    """

    drawn: Drawn = "iid"
    capabilities: Capabilities = Capabilities(rewindable=True)

    def __init__(
        self,
        num_tokens: int,
        spread: float = 2.0,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 0 <= spread < math.inf:
            raise InvalidParameterError(f"spread={spread!r}: must be a finite number from 0 up")
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_DISTRIBUTIONS if spread else 1, num_tokens)
        z_EV = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.q_EV = z_EV.softmax(1).to(dtype)

    def start(self, context: Context) -> NoState:
        self.q_EV = self.q_EV.to(context.device)
        return NoState()

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        D = budget.max_tokens
        place_BN = context.length_B[:, None] + torch.arange(D + 1, device=context.device)
        q_BNV = self.q_EV[place_BN % self.q_EV.shape[0]]
        u_BD = rng.uniform(Role.DRAFT, max(D, 1))
        drawn = [draw(q_BNV[:, depth], u_BD[:, depth]) for depth in range(D)]
        tokens_BN = torch.stack([context.root_B, *drawn], 1)
        mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        if budget.tokens_B is not None:
            mask_BN = torch.arange(D + 1, device=context.device) <= budget.tokens_B[:, None]
        return Draft.chain(tokens_BN, mask_BN, q_BNV, "iid")

    def commit(self, state: NoState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Nothing to learn."""

    def join(self, state: NoState, other: NoState) -> None:
        """Nothing to join."""
