"""The newest committed tokens of a head, with the target's hidden states.

A head reads them when it drafts again, and not when they are committed: then one program does both.
The tokens of rounds without drafts wait as well, up to ``MOST_WAITING``, so that such rounds cost a
head next to nothing.

Legend: B rows, K tokens, F width of the target's hidden states side by side.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Acceptance, Context, Draft, Lengths
from outrider.runtime import KVCache
from outrider.runtime.kv_cache.storage import KVCachePlan

MOST_WAITING = 16
"""Tokens of a row that wait before the head reads them even though it drafts nothing."""


class Newest(NamedTuple):
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
    def nothing(cls, root_B: Tensor, width: int, dtype: torch.dtype) -> "Newest":
        """No tokens, for a head that reads hidden states of this width."""
        rows = len(root_B)
        hidden_B1F = torch.zeros(rows, 1, width, dtype=dtype, device=root_B.device)
        return cls(root_B[:, None], hidden_B1F, Lengths.of([0] * rows, root_B.device))

    @classmethod
    def emitted(cls, draft: Draft, verdict: Acceptance, hidden_BNF: Tensor) -> "Newest":
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

    def followed_by(self, later: "Newest") -> "Newest":
        """These tokens, and after each row's last one those of ``later``."""
        K = later.tokens_BK.shape[1]
        place_BK = self.num.device_B[:, None] + torch.arange(K, device=self.tokens_BK.device)
        at_BKF = place_BK[..., None].expand_as(later.hidden_BKF)
        tokens_BK = pad(self.tokens_BK, (0, K)).scatter(1, place_BK, later.tokens_BK)
        hidden_BKF = pad(self.hidden_BKF, (0, 0, 0, K)).scatter(1, at_BKF, later.hidden_BKF)
        num = self.num + later.num
        most = max(num.host)
        return Newest(tokens_BK[:, :most], hidden_BKF[:, :most], num)

    def keep(self, rows: Sequence[int]) -> "Newest":
        """Those of these rows, in this order."""
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.tokens_BK.device)
        return Newest(self.tokens_BK[index_B], self.hidden_BKF[index_B], self.num.keep(rows))

    def join(self, other: "Newest") -> "Newest":
        """Those of these rows, then those of another batch's."""
        K = max(self.tokens_BK.shape[1], other.tokens_BK.shape[1])
        tokens = [pad(each.tokens_BK, (0, K - each.tokens_BK.shape[1])) for each in (self, other)]
        hidden = [
            pad(each.hidden_BKF, (0, 0, 0, K - each.hidden_BKF.shape[1])) for each in (self, other)
        ]
        return Newest(torch.cat(tokens), torch.cat(hidden), self.num.join(other.num))


class NewestCache(KVCache):
    """The keys and values of a head whose newest tokens are read when it drafts.

    Args:
        context, num_layers, limit, plan: as of ``KVCache``.
        width: F.
        dtype: of the hidden states.

    Attributes:
        base: slots of each row that hold committed tokens ahead of the newest.
        newest: the newest tokens, whose slots follow once they are read.
        is_read: whether they are read.
    """

    def __init__(
        self,
        context: Context,
        num_layers: int,
        limit: int,
        plan: KVCachePlan,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(context, num_layers, limit, plan)
        self.base = self.sequence_lengths
        self.newest = Newest.nothing(context.root_B, width, dtype)
        self.is_read = False

    @property
    def known(self) -> Lengths:
        """How many tokens of each row the head has been told of."""
        return self.base + self.newest.num

    def forget_draft(self) -> None:
        """Forgets what was written after the committed tokens."""
        self.rollback(self.known if self.is_read else self.base)

    def have_read(self, last_BH: Tensor) -> None:
        """The newest tokens are read; ``last_BH`` is the head's output for their last ones."""
        self.append(self.newest.num)
        self.is_read = True

    def renew(self, newest: Newest) -> None:
        """These tokens follow the newest, and wait together with those that are not read."""
        if not self.is_read:
            self.newest = self.newest.followed_by(newest)
            return
        self.base = self.known
        self.newest, self.is_read = newest, False

    @property
    def is_waiting_long(self) -> bool:
        """Whether the tokens that are not read should be, before more of them wait."""
        return not self.is_read and self.newest.tokens_BK.shape[1] >= MOST_WAITING

    def reread(self) -> None:
        """The newest tokens are to be read again."""
        self.rollback(self.base)
        self.is_read = False

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.base = self.base.keep(rows)
        self.newest = self.newest.keep(rows)

    def join(self, other: KVCache) -> None:
        assert isinstance(other, NewestCache)
        self.reread()
        other.reread()
        super().join(other)
        self.base = self.base.join(other.base)
        self.newest = self.newest.join(other.newest)


def at_last(values_BKX: Tensor, num_B: Tensor) -> Tensor:
    """The value of each row's last token of ``num_B``, (B, 1, X); of its first if it has none."""
    last_B11 = (num_B - 1).clamp(min=0)[:, None, None]
    return values_BKX.gather(1, last_B11.expand(-1, 1, values_BKX.shape[2]))
