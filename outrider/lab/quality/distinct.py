"""distinct-n: how many of the n-grams of the outputs are different ones.

Li et al., A Diversity-Promoting Objective Function for Neural Conversation Models, NAACL 2016:
different n-grams ÷ all n-grams, over all outputs together. It falls as outputs repeat themselves or
each other, and as they grow, so it compares outputs of similar numbers and lengths only. n-grams
are those of the model's tokens.
"""

import math
from collections.abc import Sequence


def distinct_n(outputs: Sequence[Sequence[int]], n: int) -> float:
    """The share of different n-grams; NaN if no output has n tokens.

    Args:
        outputs: token ids.
        n: of the n-grams.
    """
    ngrams = [tuple(ids[i : i + n]) for ids in outputs for i in range(len(ids) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else math.nan
