"""Prompt lookup: what followed the last tokens when the text had them before, follows again.

Saxena, "Prompt Lookup Decoding", 2023, https://github.com/apoorvumang/prompt-lookup-decoding;
independently LLMA, Yang et al., "Inference with Reference: Lossless Acceleration of Large Language
Models", 2023, https://arxiv.org/abs/2304.04487.

    n = n_max … n_min:   find j < T with  x_{j-n+1 … j} = x_{T-n+1 … T};   draft  x_{j+1} … x_{j+γ}

The longest n wins; of several places the latest or the first. Prompt and output are searched alike,
and an encoder-decoder's source text with them.

The original scans the text anew for every n in every round, T·n_max comparisons; here each length
has an index (``ngram_index``), so a token costs n_max insertions when it is committed, a draft
n_max lookups, and neither depends on the length of the text. The original takes the first match
and wants γ tokens behind it; transformers takes the first match too, but any continuation. Both
are options (``match`` and ``tail``).

Proposes: chosen chains, row by row from that row alone.

Legend: B rows, N nodes, D drafted tokens (N-1).
"""

from array import array
from collections.abc import Sequence
from sys import getsizeof
from typing import Literal, get_args

from outrider.core import Budget, Context, Draft, Drawn, Scores, Stream, Verdict
from outrider.core.errors import InvalidParameterError
from outrider.drafters.lookup.host import HostState, chain
from outrider.drafters.lookup.ngram_index import NgramIndex

Match = Literal["latest", "first"]


class LookupText:
    """One row's text and where its n-grams are.

    Args:
        sizes: the lengths n, longest first.
        latest: of several places take the latest.
        tail: tokens that must follow an n-gram before it counts.
    """

    def __init__(self, sizes: Sequence[int], latest: bool, tail: int) -> None:
        self.text = array("i")
        self.latest = latest
        self.tail = tail
        self.indices = {n: NgramIndex(self.text, n, latest) for n in sizes}

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens."""
        first = len(self.text) - self.tail + 1
        self.text.extend(tokens)
        stop = len(self.text) - self.tail + 1
        for n, index in self.indices.items():
            index.put(range(first if first > n else n, stop))

    def forget(self, num: int) -> None:
        """Takes the last so many tokens back; anew from the text where an index cannot."""
        last, kept = len(self.text) - self.tail, len(self.text) - num
        lost = {n: max(last - max(kept - self.tail, n - 1), 0) for n in self.indices}
        if all(lost[n] <= index.num_forgettable for n, index in self.indices.items()):
            del self.text[kept:]
            for n, index in self.indices.items():
                index.forget(lost[n])
        else:
            text, self.text = self.text[:kept], array("i")
            self.indices = {n: NgramIndex(self.text, n, self.latest) for n in self.indices}
            self.extend(text)

    def close(self) -> None:
        """Nothing outlives the row."""

    def continuation(self, most: int) -> Sequence[int]:
        """At most that many tokens from behind the longest match; none without a match."""
        end = len(self.text)
        for n, index in self.indices.items():
            if n <= end and (place := index.find(end)):
                return self.text[place : place + most]
        return ()

    @property
    def num_bytes(self) -> int:
        """Memory of the text and its indices."""
        return getsizeof(self.text) + sum(index.num_bytes for index in self.indices.values())


class PromptLookup:
    """Drafts by copying from the row's own text.

    Args:
        longest: n_max.
        shortest: n_min.
        match: of several places the ``latest`` or the ``first``.
        tail: tokens that must follow a match: 1 allows truncated continuations, γ is the original.

    Raises:
        InvalidParameterError: lengths that are none, another ``match``.
    """

    drawn: Drawn = "chosen"
    depth = 10  # the original's number of tokens

    def __init__(
        self, longest: int = 3, shortest: int = 1, match: Match = "latest", tail: int = 1
    ) -> None:
        if shortest < 1:
            raise InvalidParameterError(f"prompt_lookup_min={shortest!r}: must be at least 1")
        if longest < shortest:
            raise InvalidParameterError(
                f"prompt_lookup_max={longest!r}: must be at least prompt_lookup_min={shortest}"
            )
        if match not in get_args(Match):
            raise InvalidParameterError(f"match={match!r}: must be one of latest, first")
        if tail < 1:
            raise InvalidParameterError(f"tail={tail!r}: must be at least 1")
        self.sizes = range(longest, shortest - 1, -1)
        self.match = match
        self.tail = tail

    def start(self, context: Context) -> HostState[LookupText]:
        latest = self.match == "latest"
        return HostState(context, lambda row: LookupText(self.sizes, latest, self.tail))

    def propose(
        self, state: HostState[LookupText], context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        state.catch_up()
        found = [reader.continuation(budget.max_tokens) for reader in state.readers]
        return chain(state, found, budget)

    def commit(
        self, state: HostState[LookupText], draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Nothing: the next draft reads what was committed."""

    def join(self, state: HostState[LookupText], other: HostState[LookupText]) -> None:
        state.join(other)
