"""How far a sequence repeats itself: a signal that costs no forward pass.

A token is *repeated* if it is the one that followed when the two tokens before it occurred last.
The share of repeated tokens is a mean over some eight tokens, and a sequence counts as repeating
itself from the round in which that share exceeds 0.65 to the one in which it falls below 0.4.

At temperature 0 a sequence that repeats itself goes on to do so, and what a draft model makes of it
stays as it is: nearly always right, or wrong at the same tokens each time. So the moment in which
repetition begins or ends is the one to look at the draft (``reviews.py``). The signal reads
committed tokens alone.
"""

from collections.abc import Iterable

_STEP = 1 / 8
_BEGINS, _ENDS = 0.65, 0.4


class Repetition:
    """The share of repeated tokens of one sequence.

    Args:
        tokens: the sequence so far.

    Attributes:
        share: of the last tokens, those that were repeated.
        is_on: whether the sequence repeats itself.
    """

    __slots__ = ("_followers", "_last", "is_on", "share")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._followers: dict[tuple[int, int], int] = {}
        self._last = (-1, -1)
        self.share = 0.0
        self.is_on = False
        self.take(tokens)

    def take(self, tokens: Iterable[int]) -> bool:
        """Appends tokens; returns whether repetition began or ended."""
        followers, last, share = self._followers, self._last, self.share
        for token in tokens:
            share += _STEP * ((followers.get(last) == token) - share)
            followers[last] = token
            last = last[1], token
        self._last, self.share = last, share
        was_on, self.is_on = self.is_on, share > (_ENDS if self.is_on else _BEGINS)
        return was_on != self.is_on
