"""Where the sequences of a batch end: behind which tokens, and at which length.

Plain decoding never looks behind the end of a sequence. A draft may run past it, so whatever hangs
on the tokens before a position (a logits processor, a rule that reads further rows than those it
comes to) has to be kept away from what follows an end token.

Legend: B rows, N nodes, K tokens, E end tokens of a row (the most of any row).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core.draft import Draft


@dataclass(frozen=True)
class Ends:
    """The ends of the rows of a batch.

    Attributes:
        token_ids: of each row, the tokens that end its sequence (and belong to it).
        lengths: of each row, the most tokens that it may have, its prompt included.
        device: where drafts live.
    """

    token_ids: tuple[frozenset[int], ...]
    lengths: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Collection[int]],
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> "Ends":
        """From end tokens and greatest lengths, one of each per row."""
        return cls(tuple(map(frozenset, token_ids)), tuple(lengths), torch.device(device))

    @cached_property
    def ids_BE(self) -> Tensor:
        """The end tokens, filled up with -1."""
        most = max(map(len, self.token_ids), default=0)
        padded = [[*sorted(ids), *[-1] * (most - len(ids))] for ids in self.token_ids]
        ids_BE = torch.tensor(padded, dtype=torch.int64).view(len(padded), most)
        return ids_BE.to(self.device)

    @cached_property
    def length_B(self) -> Tensor:
        """``lengths`` on the device."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    def are_ends(self, tokens_BK: Tensor) -> Tensor:
        """Which of the rows' tokens end a sequence, (B, K)."""
        return (tokens_BK[..., None] == self.ids_BE[:, None]).any(-1)

    def cut(self, draft: Draft) -> Draft:
        """The draft without the nodes behind an end token, which itself stays. The root ends
        nothing. Reads the device on a CPU only, where that costs nothing."""
        if draft.num_nodes < 3 or not self.ids_BE.shape[1]:
            return draft
        ends_BN = self.are_ends(draft.tokens_BN)
        ends_BN[:, 0] = False
        if ends_BN.device.type == "cpu" and not bool(ends_BN.any()):
            return draft
        if draft.is_chain:
            behind_BN = pad(ends_BN[:, :-1].cumsum(1) > 0, (1, 0))
        else:
            behind_BN = (draft.ancestors_BNN.tril(-1) & ends_BN[:, None]).any(2)
        return replace(draft, mask_BN=draft.mask_BN & ~behind_BN)

    def cut_tokens(self, row: int, tokens: Sequence[int]) -> Sequence[int]:
        """A row's drafted tokens up to the first end token, that one included."""
        ids = self.token_ids[row]
        if ids.isdisjoint(tokens):
            return tokens
        return tokens[: next(i for i, token in enumerate(tokens, 1) if token in ids)]

    def keep(self, rows: Sequence[int]) -> "Ends":
        """Those of these rows, in this order."""
        ids, lengths = self.token_ids, self.lengths
        return Ends.of([ids[r] for r in rows], [lengths[r] for r in rows], self.device)

    def join(self, other: "Ends") -> "Ends":
        """Those of these rows and of another batch's."""
        return Ends(self.token_ids + other.token_ids, self.lengths + other.lengths, self.device)
