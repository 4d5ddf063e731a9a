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

MOST_WAITING = 32
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

    @classmethod
    def in_turn(cls, parts: Sequence["Newest"], num: Lengths) -> "Newest":
        """The tokens of some rounds, one after the other; ``num`` counts those of all rounds."""
        if len(parts) == 1:
            return parts[0]
        tokens_BK = torch.cat([part.tokens_BK for part in parts], 1)
        hidden_BKF = torch.cat([part.hidden_BKF for part in parts], 1)
        nowhere, places, before_B = tokens_BK.shape[1], [], torch.zeros_like(num.device_B)
        for part in parts:
            index_K = torch.arange(part.tokens_BK.shape[1], device=tokens_BK.device)
            num_B1 = part.num.device_B[:, None]
            places.append(torch.where(index_K < num_B1, before_B[:, None] + index_K, nowhere))
            before_B = before_B + part.num.device_B
        place_BK, most = torch.cat(places, 1), max(1, *num.host)
        place_BKF = place_BK[..., None].expand_as(hidden_BKF)
        tokens_BK = pad(tokens_BK, (0, 1)).scatter(1, place_BK, tokens_BK)
        hidden_BKF = pad(hidden_BKF, (0, 0, 0, 1)).scatter(1, place_BKF, hidden_BKF)
        return cls(tokens_BK[:, :most], hidden_BKF[:, :most], num)

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
        num_newest: how many newest tokens each row has.
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
        self._parts: list[Newest] = []
        self.num_newest: Lengths
        self.newest = Newest.nothing(context.root_B, width, dtype)
        self.is_read = False

    @property
    def newest(self) -> Newest:
        """The newest tokens, whose slots follow once they are read."""
        self._parts = [Newest.in_turn(self._parts, self.num_newest)]
        return self._parts[0]

    @newest.setter
    def newest(self, newest: Newest) -> None:
        self._parts, self.num_newest = [newest], newest.num

    @property
    def known(self) -> Lengths:
        """How many tokens of each row the head has been told of."""
        return self.base + self.num_newest

    def forget_draft(self) -> None:
        """Forgets what was written after the committed tokens."""
        self.rollback(self.known if self.is_read else self.base)

    def have_read(self, last_BH: Tensor) -> None:
        """The newest tokens are read; ``last_BH`` is the head's output for their last ones."""
        self.append(self.num_newest)
        self.is_read = True

    def renew(self, newest: Newest) -> None:
        """These tokens follow the newest, and wait together with those that are not read."""
        if not self.is_read:
            self._parts.append(newest)
            self.num_newest = self.num_newest + newest.num
            return
        self.base = self.known
        self.newest, self.is_read = newest, False

    @property
    def is_waiting_long(self) -> bool:
        """Whether the tokens that are not read should be, before more of them wait."""
        return not self.is_read and max(self.num_newest.host) >= MOST_WAITING

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
