"""What the governor may choose from: draft lengths, and sets of sources that draft."""

from dataclasses import dataclass

MOST = 8
"""The longest draft where the user and the drafter set none."""

ALL, FREE = "draft", "free sources"


def draft_lengths(most: int) -> tuple[int, ...]:
    """The lengths to choose from: 0, the Fibonacci numbers up to the longest draft, and that one.
    Lengths in between would gain little, and each has to be measured now and then. Compiled draft
    models have a program each for 1, 2, 3 and 5 tokens, and draft 4 by two of them."""
    found, following = [0], 1
    while following < most:
        found.append(following)
        following = max(2, found[-1] + found[-2])
    return (*found, most) if most else (0,)


@dataclass(frozen=True)
class Sources:
    """What the governor may choose from.

    Attributes:
        names: the sets of sources that may draft: all of them, and where there are some without
            a draft model, these alone.
        lengths: draft lengths in ascending order, 0 first.
        draft_ratio: seconds of a draft step over those of a target pass, before any is measured.
        lags: whether a draft model has a cache of its own, which falls behind in rounds without
            drafts. Few tokens wait for a head, which reads them and drafts in one program, and an
            early exit shares the target's cache.
        fixed_length: the draft length of batches with a row whose output must be repeatable and
            depends on it; None chooses that, too.
    """

    lengths: tuple[int, ...] = draft_lengths(MOST)
    names: tuple[str, ...] = (ALL,)
    draft_ratio: float = 0.1
    lags: bool = True
    fixed_length: int | None = None

    def up_to(self, most: int) -> tuple[int, ...]:
        """The draft lengths that are not longer than this."""
        if most >= self.lengths[-1]:
            return self.lengths
        return tuple(length for length in self.lengths if length <= most)
