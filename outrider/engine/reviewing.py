"""What a governor's reviews compare: the newest tokens of a running batch, emitted without drafts.

``governor/reviews.py`` says what a review is. The draft model says how probable it finds each
token, q(x); the target's p(x) is kept here from the round that emitted it.

Legend: B rows, K tokens.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from outrider.core import Context, Drafter, ReviewsTokens, Round, Verifier
from outrider.engine.governor.reviews import MOST_REVIEWED
from outrider.verifiers import Block, Greedy, Rejection

_OVERLAP = Greedy, Rejection, Block


class Unreviewed:
    """The tokens of the last rounds, as long as these drafted nothing and had the same rows.

    Args:
        drafter: the running batch's.
    """

    def __init__(self, drafter: Drafter[Any]) -> None:
        self._drafter: ReviewsTokens | None = None
        if drafter.capabilities.reviews:
            assert isinstance(drafter, ReviewsTokens)
            self._drafter = drafter
        self._probs: deque[Tensor | None] = deque(maxlen=MOST_REVIEWED)
        self._is_refused = False

    @property
    def num(self) -> int:
        """How many tokens of each row a review would compare."""
        return len(self._probs)

    def change_rows(self) -> None:
        """The batch has other rows from now on."""
        self._probs.clear()
        self._is_refused = False

    def add(self, round_: Round, verifier: Verifier, *, drafted: bool) -> None:
        """Takes the tokens of a round; one that drafted ends what came before.

        Args:
            round_: the round.
            verifier: its rule, which has to accept as often as the draft model's distribution and
                the target's overlap.
            drafted: whether any row was asked for a draft.
        """
        if self._drafter is None or self._is_refused:
            return
        if drafted or round_.draft.num_nodes > 1 or not accepts_overlap(verifier):
            self._probs.clear()
        elif verifier.needs == "argmax":
            self._probs.append(None)
        else:
            self._probs.append(round_.p_BNV[:, 0].gather(1, round_.emitted_BK[:, :1]))

    def review(self, state: Any | None, context: Context) -> Tensor | None:
        """The labels of these tokens, (B, K): the probability that each would have been accepted as
        a drafted one, estimated from this token. None where the draft model cannot tell; it is
        then not asked again before the batch has other rows.

        Args:
            state: the drafter's, which then reads what it lacks; None where it reads the newest
                tokens alone.
            context: the running batch.
        """
        assert self._drafter is not None
        q_BK = self._drafter.review(state, context, self.num)
        probs = [p_B1 for p_B1 in self._probs if p_B1 is not None]
        self._probs.clear()
        self._is_refused = q_BK is None
        if q_BK is None or not probs:
            return q_BK
        p_BK = torch.cat(probs, 1)
        return (q_BK[:, -p_BK.shape[1] :] / p_BK).clamp(max=1)


def accepts_overlap(verifier: Verifier) -> bool:
    """Whether a rule accepts a token after the root with probability Σ min(p, q)."""
    return isinstance(verifier, _OVERLAP)
