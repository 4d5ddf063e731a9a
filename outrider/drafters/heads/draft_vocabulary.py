"""The reduced vocabulary of a head: the target's tokens that the head can draft.

A head with few output tokens is cheaper: its output layer is most of its weights. The distribution
that it drafts from is zero for all other tokens of the target's vocabulary. Verification corrects
for that as for any other difference between q and p.

Checkpoints hold the vocabulary as two tables:

    d2t (D)   target id of draft token i:   i + d2t[i]
    t2d (V)   whether the head can draft target token j

Zhang et al., "FR-Spec", ACL 2025; Li et al., "EAGLE-3", 2025.

Legend: B rows, N nodes, D draft tokens, V tokens of the target's vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.core.errors import ModelLoadError


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Which target tokens a head can draft.

    Attributes:
        target_ids_D: target id of each draft token, in the order of the head's outputs.
        num_tokens: V.
    """

    target_ids_D: Tensor
    num_tokens: int

    @classmethod
    def full(cls, num_tokens: int) -> "DraftVocabulary":
        """All tokens of the target."""
        return cls(torch.arange(num_tokens), num_tokens)

    @classmethod
    def most_frequent(cls, count_V: Tensor, size: int) -> "DraftVocabulary":
        """The ``size`` tokens that were counted most often, in ascending order of their ids; of
        equal counts the lowest ids.

        Raises:
            ValueError: a size below 1 or beyond the target's vocabulary.
        """
        V = len(count_V)
        if not 1 <= size <= V:
            raise ValueError(f"a draft vocabulary of {size} tokens: the target has 1 to {V}")
        order_V = count_V.sort(descending=True, stable=True).indices
        return cls(order_V[:size].sort().values, V)

    @classmethod
    def from_tables(
        cls, d2t_D: Tensor | None, t2d_V: Tensor | None, size: int, num_tokens: int, name: str
    ) -> "DraftVocabulary":
        """The vocabulary of a checkpoint.

        Args:
            d2t_D: the offset table; None where the head drafts every token.
            t2d_V: the membership table; None where the checkpoint has none.
            size: D, from the head's output layer.
            num_tokens: V, from its configuration.
            name: how messages call the head.

        Raises:
            ModelLoadError: tables that do not fit each other or the sizes; names both numbers.
        """
        if d2t_D is None:
            if size != num_tokens:
                raise ModelLoadError(
                    f"{name} drafts {size} of {num_tokens} tokens and has no table d2t that says "
                    f"which: the checkpoint is incomplete; get it again"
                )
            return cls.full(num_tokens)
        if d2t_D.shape != (size,):
            raise ModelLoadError(
                f"{name}: table d2t has shape {tuple(d2t_D.shape)}, and the head has {size} output "
                f"tokens: the files belong to different heads"
            )
        ids_D = d2t_D.to(torch.int64) + torch.arange(size)
        _check_range(ids_D, num_tokens, name)
        if t2d_V is not None:
            _check_membership(t2d_V, ids_D, num_tokens, name)
        return cls(ids_D, num_tokens)

    @property
    def size(self) -> int:
        """D."""
        return len(self.target_ids_D)

    @property
    def is_full(self) -> bool:
        """Whether draft tokens and target tokens are the same; checkpoints then have no tables."""
        return self.size == self.num_tokens and bool(
            (self.target_ids_D == torch.arange(self.size, device=self.target_ids_D.device)).all()
        )

    @property
    def d2t_D(self) -> Tensor:
        """The offset table of a checkpoint."""
        return self.target_ids_D - torch.arange(self.size, device=self.target_ids_D.device)

    @property
    def t2d_V(self) -> Tensor:
        """The membership table of a checkpoint."""
        mask_V = torch.zeros(self.num_tokens, dtype=torch.bool, device=self.target_ids_D.device)
        mask_V[self.target_ids_D] = True
        return mask_V

    def to(self, device: torch.device | str) -> "DraftVocabulary":
        """The same vocabulary on a device."""
        return DraftVocabulary(self.target_ids_D.to(device), self.num_tokens)

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Draft ids of target tokens that can be drafted, of any shape."""
        same = tokens[..., None] == self.target_ids_D
        return same.int().argmax(-1)

    def widened(self, values_BND: Tensor, outside: float = -torch.inf) -> Tensor:
        """Logits, or other values, over the target's vocabulary, (B, N, V): ``outside`` for tokens
        that are not drafted."""
        B, N, _ = values_BND.shape
        values_BNV = values_BND.new_full((B, N, self.num_tokens), outside)
        return values_BNV.index_copy_(2, self.target_ids_D, values_BND)


class DraftingModule(nn.Module):
    """A module that drafts within a vocabulary, whose table moves with the module.

    Args:
        vocabulary: the tokens that it drafts.
    """

    def __init__(self, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self.num_tokens = vocabulary.num_tokens
        self.register_buffer("target_ids_D", vocabulary.target_ids_D, persistent=False)

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that it drafts."""
        assert isinstance(self.target_ids_D, Tensor)
        return DraftVocabulary(self.target_ids_D, self.num_tokens)


def _check_range(ids_D: Tensor, num_tokens: int, name: str) -> None:
    outside_D = (ids_D < 0) | (ids_D >= num_tokens)
    if bool(outside_D.any()):
        first = int(outside_D.nonzero()[0])
        raise ModelLoadError(
            f"{name}: table d2t maps draft token {first} to target token {int(ids_D[first])}, and "
            f"the target's vocabulary has {num_tokens}: the head was made for another target"
        )
    distinct = len(ids_D.unique())
    if distinct != len(ids_D):
        raise ModelLoadError(
            f"{name}: table d2t maps {len(ids_D)} draft tokens to {distinct} target tokens; they "
            f"must all differ, so the table is damaged: get the checkpoint again"
        )


def _check_membership(t2d_V: Tensor, ids_D: Tensor, num_tokens: int, name: str) -> None:
    if t2d_V.shape != (num_tokens,):
        raise ModelLoadError(
            f"{name}: table t2d has shape {tuple(t2d_V.shape)}, and the target's vocabulary has "
            f"{num_tokens} tokens: the head was made for another target"
        )
    mask_V = t2d_V.to(torch.bool)
    if int(mask_V.sum()) != len(ids_D) or not bool(mask_V[ids_D].all()):
        raise ModelLoadError(
            f"{name}: table t2d marks {int(mask_V.sum())} tokens, and d2t lists {len(ids_D)}; they "
            f"must be the same tokens: the tables belong to different heads"
        )
