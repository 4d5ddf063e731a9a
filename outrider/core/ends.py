"""Where the sequences of a batch end: after which tokens, and at which length.

Plain decoding never scores a position after the end of a sequence, but a draft may run past the
end. Whatever depends on the tokens before a position (a logits processor, a rule that reads rows
beyond the ones it stops at) must therefore not see the nodes that follow an end token.

Legend: B rows, N nodes, K drafted or emitted tokens, Z end tokens of a row (the most of any row).
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
    """The end tokens and maximum lengths of the rows of a batch.

    Attributes:
        token_ids: for each row, the tokens that end its sequence and are part of it.
        lengths: for each row, the maximum number of tokens, prompt included.
        device: the device of the drafts.
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
        """From the end tokens and the maximum length of each row."""
        return cls(tuple(map(frozenset, token_ids)), tuple(lengths), torch.device(device))

    @cached_property
    def ids_BZ(self) -> Tensor:
        """The end tokens of each row, padded with -1."""
        most = max(map(len, self.token_ids), default=0)
        padded = [[*sorted(ids), *[-1] * (most - len(ids))] for ids in self.token_ids]
        ids_BZ = torch.tensor(padded, dtype=torch.int64).view(len(padded), most)
        return ids_BZ.to(self.device)

    @cached_property
    def length_B(self) -> Tensor:
        """``lengths`` on the device."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    def are_ends(self, tokens_BK: Tensor) -> Tensor:
        """Which tokens are end tokens of their row, (B, K)."""
        return (tokens_BK[..., None] == self.ids_BZ[:, None]).any(-1)

    def cut(self, draft: Draft) -> Draft:
        """The draft without the nodes that follow an end token; the end token itself stays.

        The root never counts as an end token. Synchronises only on a CPU, where that is free.
        """
        if draft.num_nodes < 3 or not any(self.token_ids):
            return draft
        if draft.tokens_BN.device.type == "cpu":
            drafted = draft.tokens_BN.tolist()
            if all(
                ids.isdisjoint(row[1:]) for ids, row in zip(self.token_ids, drafted, strict=True)
            ):
                return draft
        ends_BN = self.are_ends(draft.tokens_BN)
        ends_BN[:, 0] = False
        if draft.is_chain:
            after_BN = pad(ends_BN[:, :-1].cumsum(1) > 0, (1, 0))
        else:
            after_BN = (draft.ancestors_BNN.tril(-1) & ends_BN[:, None]).any(2)
        return replace(draft, mask_BN=draft.mask_BN & ~after_BN)

    def cut_tokens(self, row: int, tokens: Sequence[int]) -> Sequence[int]:
        """A row's drafted tokens up to and including the first end token."""
        ids = self.token_ids[row]
        if ids.isdisjoint(tokens):
            return tokens
        return tokens[: next(i for i, token in enumerate(tokens, 1) if token in ids)]

    def keep(self, rows: Sequence[int]) -> "Ends":
        """The ends of these rows, in this order."""
        ids, lengths = self.token_ids, self.lengths
        return Ends.of([ids[r] for r in rows], [lengths[r] for r in rows], self.device)

    def join(self, other: "Ends") -> "Ends":
        """The ends of these rows followed by those of another batch."""
        return Ends(self.token_ids + other.token_ids, self.lengths + other.lengths, self.device)
