"""TEMPLATE for ``outrider/drafters/<kind>/<name>.py``: fill in the angle brackets, drop this line.

<Name of the method>: <how it drafts, in one sentence>.

<Authors>, "<Title>", <venue and year>, <section>, <link>. <If the paper swaps p and q, say so.>
<Where this file departs from the authors' code, and why.>

    q(x) = (number of times x occurs in the row so far) / (length of the row)

This example draws from the frequencies of the row's own tokens. Its drafts are poor, but a lossless
verifier keeps the output exact for any draft, provided that ``probs_BNV`` is the distribution from
which the tokens were actually drawn.

Proposes: i.i.d. chains.

Legend: B rows, N nodes (node 0 is the root), D drafted tokens (N-1), K tokens emitted at most
(D+1), T context, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Role,
    Scores,
    Stream,
    Verdict,
    draw,
)


@dataclass
class UnigramState:
    """The drafter's state for one batch. The drafter itself holds configuration and weights only.

    Attributes:
        counts_BV: occurrences of each token in prompt and output (updated by ``commit``).
    """

    counts_BV: Tensor

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order: rows leave a running batch, and others move up."""
        kept_B = torch.tensor(rows, dtype=torch.int64, device=self.counts_BV.device)
        self.counts_BV = self.counts_BV[kept_B]  # a batch ends with no rows at all


class Unigram:
    """<One line.> Configuration is bound at construction: important parameters first, the others
    keyword-only.

    ``capabilities`` tells the engine what the drafter needs. A drafter that runs a model, proposes
    trees or can be rolled back declares that there (``outrider/core/capabilities.py``).
    """

    drawn: Drawn = "iid"
    capabilities: Capabilities = Capabilities()  # runs no model and proposes chains

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size

    def start(self, context: Context) -> UnigramState:
        """State for a batch. Rows are ragged: tokens beyond a row's length are arbitrary."""
        tokens_BT = context.tokens_BT
        position_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        counts_BV = tokens_BT.new_zeros(context.num_rows, self.vocab_size, dtype=torch.float64)
        return UnigramState(_add(counts_BV, tokens_BT, position_T < context.length_B[:, None]))

    def propose(self, state: UnigramState, context: Context, budget: Budget, rng: Stream) -> Draft:
        """Drafts at most ``budget`` tokens per row. Mutates nothing; draws from ``rng`` only."""
        D = budget.max_tokens
        q_BV = state.counts_BV / state.counts_BV.sum(-1, keepdim=True)
        u_BD = rng.uniform(Role.DRAFT, D)
        tokens_BN = torch.stack(
            [context.root_B, *(draw(q_BV, u_BD[:, depth]) for depth in range(D))], 1
        )
        mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        if budget.tokens_B is not None:
            mask_BN = torch.arange(D + 1, device=mask_BN.device) <= budget.tokens_B[:, None]
        return Draft.chain(tokens_BN, mask_BN, q_BV[:, None].expand(-1, D + 1, -1), "iid")

    def commit(self, state: UnigramState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Counts the emitted tokens: the accepted path and one more. Mutates the state."""
        emitted_BK = verdict.emitted(draft)
        column_K = torch.arange(emitted_BK.shape[1], device=emitted_BK.device)
        _add(state.counts_BV, emitted_BK, column_K <= verdict.num_accepted_B[:, None])

    def join(self, state: UnigramState, other: UnigramState) -> None:
        """Appends the rows of ``other``, which enter the running batch. Mutates the first state."""
        state.counts_BV = torch.cat([state.counts_BV, other.counts_BV])


def _add(counts_BV: Tensor, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Counts the tokens under the mask, in place. Tokens outside it may have any value."""
    return counts_BV.scatter_add_(1, tokens_BT.where(mask_BT, 0), mask_BT.to(counts_BV.dtype))
