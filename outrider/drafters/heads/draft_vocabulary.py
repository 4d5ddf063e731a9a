"""The reduced vocabulary of a head: the tokens of the target that the head can draft.

Li, Wei, Zhang and Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, whose released code and the ``speculators`` format store it as two tables:

    d2t[d] = v - d     the target's id of draft token d, as an offset
    t2d[v]             whether the target's token v can be drafted

As a distribution over the target's vocabulary, a head's q is zero outside of it. Rejection sampling
then samples the tokens outside from the residual, so a lossless rule stays lossless.

Legend: V vocabulary of the target, D draft vocabulary, … any leading dimensions.
"""

import torch
from torch import Tensor, nn

from outrider.core.errors import VocabularyMismatchError


class DraftVocabulary(nn.Module):
    """The tokens that a head drafts, as a module whose two tables are saved with the head.

    Args:
        t2d_V: whether each token of the target can be drafted, bool.
        d2t_D: offsets from draft ids to the target's ids, in ascending order of these; None computes
            them from ``t2d_V``.

    Attributes:
        t2d, d2t: the tables.
        target_ids_D: the target's id of each draft token.

    Raises:
        VocabularyMismatchError: tables that contradict each other; the message names the numbers.
    """

    t2d: Tensor
    d2t: Tensor
    target_ids_D: Tensor

    def __init__(self, t2d_V: Tensor, d2t_D: Tensor | None = None) -> None:
        super().__init__()
        t2d_V = t2d_V.bool()
        ids_D = t2d_V.nonzero()[:, 0]
        offsets_D = ids_D - torch.arange(len(ids_D), device=ids_D.device)
        if d2t_D is not None:
            _check(t2d_V, d2t_D, offsets_D)
        self.register_buffer("t2d", t2d_V)
        self.register_buffer("d2t", offsets_D)
        self.register_buffer("target_ids_D", ids_D, persistent=False)

    @classmethod
    def most_frequent(cls, count_V: Tensor, num_tokens: int) -> "DraftVocabulary":
        """The most frequent tokens; of equally frequent ones, those with the lowest ids.

        Args:
            count_V: how often each of the target's tokens occurs in the training data.
            num_tokens: D, from 1 to V.

        Raises:
            VocabularyMismatchError: a size outside of that range.
        """
        if not 1 <= num_tokens <= len(count_V):
            raise VocabularyMismatchError(
                f"a draft vocabulary of {num_tokens} tokens: the target has {len(count_V)}; take "
                f"between 1 and all of them"
            )
        order_V = count_V.argsort(descending=True, stable=True)
        t2d_V = torch.zeros(len(count_V), dtype=torch.bool, device=count_V.device)
        t2d_V[order_V[:num_tokens]] = True
        return cls(t2d_V)

    @property
    def num_tokens(self) -> int:
        """D."""
        return self.d2t.shape[0]

    @property
    def num_target_tokens(self) -> int:
        """V."""
        return self.t2d.shape[0]

    def widened(self, logits_D: Tensor) -> Tensor:
        """Logits over the target's vocabulary, (…, V): minus infinity for tokens that cannot be
        drafted."""
        logits_V = logits_D.new_full((*logits_D.shape[:-1], self.num_target_tokens), -torch.inf)
        logits_V[..., self.target_ids_D] = logits_D
        return logits_V

    def narrowed(self, logits_V: Tensor) -> Tensor:
        """Of logits over the target's vocabulary, those of the tokens that can be drafted,
        (…, D)."""
        return logits_V[..., self.target_ids_D]


def _check(t2d_V: Tensor, d2t_D: Tensor, offsets_D: Tensor) -> None:
    if d2t_D.shape != offsets_D.shape:
        raise VocabularyMismatchError(
            f"the head's t2d table marks {len(offsets_D)} of {len(t2d_V)} tokens, and its d2t "
            f"table has {len(d2t_D)} entries: they must be as many; get the head's files again"
        )
    wrong = (d2t_D.to(offsets_D) != offsets_D).nonzero()[:, 0]
    if len(wrong):
        draft_id = int(wrong[0])
        raise VocabularyMismatchError(
            f"the head's d2t table maps draft token {draft_id} to token "
            f"{draft_id + int(d2t_D[draft_id])}, and its t2d table to token "
            f"{draft_id + int(offsets_D[draft_id])}: get the head's files again"
        )
