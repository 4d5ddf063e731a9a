"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last n tokens.

Saxena, "Prompt Lookup Decoding", 2023, https://github.com/apoorvumang/prompt-lookup-decoding;
independently LLMA, Yang et al., "Inference with Reference: Lossless Acceleration of Large Language
Models", 2023, https://arxiv.org/abs/2304.04487.

    n = n_max … n_min:   find j < T with  x_{j-n+1 … j} = x_{T-n+1 … T};   draft  x_{j+1} … x_{j+γ}

The longest n that matches wins; of several matches the latest or the first. Prompt, output and the
source of an encoder-decoder are all searched.

The original scans the whole sequence for every n in every round, T·n_max comparisons. Here each
length has an index (``ngram_index``): committing a token costs n_max insertions, a draft n_max
lookups, and neither depends on the length of the sequence. The original takes the first match and
requires γ tokens after it; transformers takes the first match and any continuation. Options
``match`` and ``tail`` select both.

Proposes: chosen chains, each row's from that row alone.

Legend: B rows, N nodes (node 0 is the root).
"""

from array import array
from collections.abc import Sequence
from sys import getsizeof
from typing import Literal, get_args

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Scores, Stream, Verdict
from outrider.core.errors import InvalidParameterError
from outrider.drafters.lookup.host import HostState, chain
from outrider.drafters.lookup.ngram_index import NgramIndex

Match = Literal["latest", "first"]

DEPTH = 10
"""The draft length of the original."""


class LookupReader:
    """One row's tokens and the index of their n-grams.

    Args:
        sizes: the lengths n, longest first.
        latest: of several matches take the latest.
        tail: tokens that must follow an n-gram before it is inserted.
    """

    def __init__(self, sizes: Sequence[int], latest: bool, tail: int) -> None:
        self.tokens = array("i")
        self.latest = latest
        self.tail = tail
        self.indices = {n: NgramIndex(self.tokens, n, latest) for n in sizes}

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens."""
        first = len(self.tokens) - self.tail + 1
        self.tokens.extend(tokens)
        stop = len(self.tokens) - self.tail + 1
        for n, index in self.indices.items():
            index.put(range(first if first > n else n, stop))

    def forget(self, num: int) -> None:
        """Undoes the last ``num`` tokens; rebuilds the indices if one cannot undo as many."""
        last, kept = len(self.tokens) - self.tail, len(self.tokens) - num
        lost = {n: max(last - max(kept - self.tail, n - 1), 0) for n in self.indices}
        if all(lost[n] <= index.num_forgettable for n, index in self.indices.items()):
            del self.tokens[kept:]
            for n, index in self.indices.items():
                index.forget(lost[n])
        else:
            tokens, self.tokens = self.tokens[:kept], array("i")
            self.indices = {n: NgramIndex(self.tokens, n, self.latest) for n in self.indices}
            self.extend(tokens)

    def close(self) -> None:
        """Does nothing: no memory outlives the row."""

    def continuation(self, most: int) -> Sequence[int]:
        """At most ``most`` tokens from after the longest match; none without a match."""
        end = len(self.tokens)
        for n, index in self.indices.items():
            if n <= end and (position := index.find(end)):
                return self.tokens[position : position + most]
        return ()

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens and their indices in bytes."""
        return getsizeof(self.tokens) + sum(index.num_bytes for index in self.indices.values())


class PromptLookup:
    """Drafts by copying from the row's own tokens.

    Args:
        longest: n_max.
        shortest: n_min.
        match: of several matches the ``latest`` or the ``first``.
        tail: tokens that must follow a match: 1 allows truncated continuations, γ is the original.

    Raises:
        InvalidParameterError: n_min or ``tail`` below 1, n_max below n_min, another ``match``.
    """

    drawn: Drawn = "chosen"
    capabilities: Capabilities = Capabilities(depth=DEPTH, rewindable=True)

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

    def start(self, context: Context) -> HostState[LookupReader]:
        latest = self.match == "latest"
        return HostState(context, lambda row: LookupReader(self.sizes, latest, self.tail))

    def propose(
        self, state: HostState[LookupReader], context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        state.catch_up()
        found = [reader.continuation(budget.max_tokens) for reader in state.readers]
        return chain(state, found, budget)

    def commit(
        self, state: HostState[LookupReader], draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Does nothing: the next ``propose`` reads what was committed."""

    def join(self, state: HostState[LookupReader], other: HostState[LookupReader]) -> None:
        state.join(other)
