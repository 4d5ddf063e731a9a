"""Committed tokens that a head has not read yet, with the target's hidden states.

A head that reads them when it drafts again, and not when they are committed, does both by one
program.

Legend: B rows, K tokens, F width of the target's hidden states side by side.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Acceptance, Draft, Lengths


class Unread(NamedTuple):
    """Tokens to read.

    Attributes:
        tokens_BK: each row's first ``num`` tokens; a row with none has its root first.
        hidden_BKF: the target's hidden states at the token before each.
        num: how many tokens each row has.
    """

    tokens_BK: Tensor
    hidden_BKF: Tensor
    num: Lengths

    @classmethod
    def nothing(cls, root_B: Tensor, width: int, dtype: torch.dtype) -> "Unread":
        """No tokens, for a head that reads hidden states of this width."""
        rows = len(root_B)
        hidden_B1F = torch.zeros(rows, 1, width, dtype=dtype, device=root_B.device)
        return cls(root_B[:, None], hidden_B1F, Lengths.of([0] * rows, root_B.device))

    @classmethod
    def emitted(cls, draft: Draft, verdict: Acceptance, hidden_BNF: Tensor) -> "Unread":
        """The tokens that a round emitted.

        Args:
            draft: the draft.
            verdict: what was accepted of it.
            hidden_BNF: the target's hidden states at its nodes.
        """
        K, F = max(verdict.num_emitted.host), hidden_BNF.shape[2]
        tokens_BK = verdict.emitted(draft)[:, :K]
        if draft.is_chain:
            return cls(tokens_BK, hidden_BNF[:, :K], verdict.num_emitted)
        node_BK1 = pad(verdict.path_BD[:, : K - 1], (1, 0))[..., None]
        hidden_BKF = hidden_BNF.gather(1, node_BK1.expand(-1, -1, F))
        return cls(tokens_BK, hidden_BKF, verdict.num_emitted)

    def keep(self, rows: Sequence[int]) -> "Unread":
        """Those of these rows, in this order."""
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.tokens_BK.device)
        return Unread(self.tokens_BK[index_B], self.hidden_BKF[index_B], self.num.keep(rows))

    def join(self, other: "Unread") -> "Unread":
        """Those of these rows, then those of another batch's."""
        K = max(self.tokens_BK.shape[1], other.tokens_BK.shape[1])
        tokens = [pad(each.tokens_BK, (0, K - each.tokens_BK.shape[1])) for each in (self, other)]
        hidden = [
            pad(each.hidden_BKF, (0, 0, 0, K - each.hidden_BKF.shape[1])) for each in (self, other)
        ]
        return Unread(torch.cat(tokens), torch.cat(hidden), self.num.join(other.num))


def at_last(values_BKX: Tensor, num_B: Tensor) -> Tensor:
    """The value of each row's last token of ``num_B``, (B, 1, X); of its first if it has none."""
    last_B11 = (num_B - 1).clamp(min=0)[:, None, None]
    return values_BKX.gather(1, last_B11.expand(-1, 1, values_BKX.shape[2]))
