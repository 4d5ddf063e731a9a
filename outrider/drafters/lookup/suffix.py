"""Suffix decoding: continue as the longest match continued most often, here or in earlier texts.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS
2025, https://arxiv.org/abs/2411.04975; Hu et al., "SAM Decoding: Speculative Decoding via Suffix
Automaton", ACL 2025, https://arxiv.org/abs/2411.10666, for the automaton in place of a tree.

    s     = the longest suffix of the text that occurred before, p tokens long
    P(x|s) = places of s followed by x  /  places of s followed by anything
    D(N)  = Π P along the path from s to node N
    draft = the nodes with the largest D, at most α p of them;   score = Σ D

One automaton is over the request, others over the outputs of requests that have ended; each offers
a draft, and the largest score, the number of tokens it expects to be accepted, wins. ``min_prob``
leaves out nodes with a smaller D. As a chain, only the likeliest token follows each node.

The paper tries all suffixes of a tree of bounded depth and takes the best score; here each text
offers its longest match, of any length. Of a state that had more than ``MAX_CHILDREN`` different
continuations (``suffix_index``), the newest and the first are considered.

The corpus is shared by all requests of a drafter, so what is drafted for one depends on which
others ended before it. With the rule ``Coupled``, which the method takes, that does not change a
text; with another lossless rule it changes texts, though never their distribution.

Proposes: chosen chains or trees.

Legend: B rows, N nodes, D drafted tokens (N-1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, get_args

from outrider.core import Budget, Context, Draft, Drawn, Scores, Stream, Verdict
from outrider.core.errors import InvalidParameterError
from outrider.drafters.lookup.host import HostState, Tree, chain, trees
from outrider.drafters.lookup.suffix_corpus import Corpus, Cursor
from outrider.drafters.lookup.suffix_index import SEPARATOR, SuffixIndex

Shape = Literal["chain", "tree"]
TREE_WIDTH = 4
TREE_NODES = 16
MAX_NODES = 1024
NOTHING = Tree([], ())


@dataclass(frozen=True)
class Expand:
    """How continuations of a state become a draft.

    Attributes:
        shape: ``chain`` or ``tree``.
        factor: α, nodes per matched token.
        min_prob: no node with a smaller D.
    """

    shape: Shape
    factor: float
    min_prob: float

    def bound(self, matched: int, most: int) -> float:
        """The largest score that there may be behind a match: one per node, and one per depth."""
        return min(self.factor * matched, most)

    def __call__(
        self, index: SuffixIndex, state: int, matched: int, most: int
    ) -> tuple[float, Tree]:
        """The score and the draft behind a state, at most ``most`` deep."""
        left = int(min(self.factor * matched, MAX_NODES))
        if self.shape == "chain":
            return _chain(index, state, min(left, most), self.min_prob)
        return _tree(index, state, min(left, TREE_NODES), most, self.min_prob)


def _chain(index: SuffixIndex, state: int, left: int, min_prob: float) -> tuple[float, Tree]:
    """The likeliest path."""
    count, end, text = index.count, index.end, index.text
    tokens: list[int] = []
    D, score = 1.0, 0.0
    while left > 0 and (child := index.likeliest_child(state)):
        followed = index.num_followed(state)
        places, place = count[child], end[child]
        if places < followed:
            D *= places / followed
        token = text[place - 1]
        if min_prob > D or token == SEPARATOR:
            break
        tokens.append(token)
        score += D
        left -= 1
        if places == 1:  # from here on there is one path, and it stands in the text
            run = text[place : place + left]
            if SEPARATOR in run:
                run = run[: run.index(SEPARATOR)]
            tokens.extend(run)
            score += D * len(run)
            break
        state = child
    return score, Tree.chain(tokens)


def _tree(
    index: SuffixIndex, state: int, left: int, most: int, min_prob: float
) -> tuple[float, Tree]:
    """The likeliest nodes, best first."""
    tokens: list[int] = []
    parents: list[int] = []
    count, end, text = index.count, index.end, index.text
    score, D, node, depth, num = 0.0, 1.0, 0, 0, 0
    waiting: list[tuple[float, int, int, int, int]] = []
    while left > 0:
        if depth < most:
            followed = index.num_followed(state)
            for child in index.likeliest_children(state, TREE_WIDTH):
                share = D * min(count[child] / followed, 1.0)
                if min_prob <= share and text[end[child] - 1] != SEPARATOR:
                    heappush(waiting, (-share, num, child, node, depth + 1))
                    num += 1
        if not waiting:
            break
        minus_D, _, state, parent, depth = heappop(waiting)
        D = -minus_D
        score += D
        left -= 1
        tokens.append(text[end[state] - 1])
        parents.append(parent)
        node = len(tokens)
    return score, Tree(tokens, parents)


class SuffixText:
    """One row's automaton, and where the row stands in those of the corpus.

    Args:
        corpus: the shared texts.
        begin: where the output begins.
    """

    def __init__(self, corpus: Corpus, begin: int) -> None:
        self.index = SuffixIndex()
        self._corpus = corpus
        self._begin = begin
        self._cursors: list[Cursor] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens."""
        self.index.extend(tokens)
        with self._corpus.lock:
            for cursor in self._cursors:
                cursor.extend(tokens)

    def forget(self, num: int) -> None:
        """Takes the last so many tokens back."""
        self._cursors = []  # new ones will find their places
        if num <= self.index.num_forgettable:
            self.index.forget(num)
            return
        kept = self.index.text[: len(self.index.text) - num]
        self.index = SuffixIndex()
        self.index.extend(kept)

    def close(self) -> None:
        """Hands the output to the corpus."""
        with self._corpus.lock:
            self._corpus.add(self.index.text[self._begin :])

    def continuation(self, expand: Expand, most: int) -> Tree:
        """The draft with the best score, of equals the first. A longer match is asked first, and
        none that could not win any more."""
        with self._corpus.lock:
            return self._best(expand, most)

    def _best(self, expand: Expand, most: int) -> Tree:
        self._cursors = self._corpus.cursors(self._cursors, self.index.text)
        state = max(self.index.link[self.index.last], 0)
        if not self._cursors:
            return expand(self.index, state, self.index.length[state], most)[1]
        matches = [(self.index.length[state], 0, self.index, state)]
        for i, cursor in enumerate(self._cursors, 1):
            matches.append((cursor.matched, -i, cursor.index, cursor.settled()))
        best, tree = (0.0, 0), NOTHING
        for matched, place, index, state in sorted(matches, reverse=True):
            if (expand.bound(matched, most), place) > best:
                score, offer = expand(index, state, matched, most)
                if (score, place) > best:
                    best, tree = (score, place), offer
        return tree


class SuffixDecoding:
    """Drafts the likeliest continuations of the longest match.

    Args:
        shape: ``chain`` or ``tree``.
        factor: α, tokens drafted per matched token (of a tree: its nodes, 16 at most).
        min_prob: nothing less likely is drafted.
        corpus_tokens: most tokens kept of requests that have ended; 0 keeps none.

    Raises:
        InvalidParameterError: a number outside its range, another shape.
    """

    drawn: Drawn = "chosen"
    depth = 16

    def __init__(
        self,
        shape: Shape = "chain",
        factor: float = 2.0,
        min_prob: float = 0.1,
        corpus_tokens: int = 100_000,
    ) -> None:
        if shape not in get_args(Shape):
            raise InvalidParameterError(f"shape={shape!r}: must be one of chain, tree")
        if not 0 < factor < float("inf"):
            raise InvalidParameterError(f"factor={factor!r}: must be a finite number above 0")
        if not 0 <= min_prob <= 1:
            raise InvalidParameterError(f"min_prob={min_prob!r}: must be in [0, 1]")
        if corpus_tokens < 0:
            raise InvalidParameterError(f"corpus_tokens={corpus_tokens!r}: must be at least 0")
        self.shape = shape
        self.drafts_trees = shape == "tree"
        self.corpus = Corpus(corpus_tokens)
        self._expand = Expand(shape, factor, min_prob)

    def start(self, context: Context) -> HostState[SuffixText]:
        sources = context.sources or [()] * context.num_rows
        begins = [len(s) + n for s, n in zip(sources, context.lengths, strict=True)]
        return HostState(context, lambda row: SuffixText(self.corpus, begins[row]))

    def propose(
        self, state: HostState[SuffixText], context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        state.catch_up()
        most = budget.max_tokens
        found = [reader.continuation(self._expand, most) for reader in state.readers]
        if self.shape == "tree":
            return trees(state, found, budget)
        return chain(state, [tree.tokens for tree in found], budget)

    def commit(
        self, state: HostState[SuffixText], draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Nothing: the next draft reads what was committed."""

    def join(self, state: HostState[SuffixText], other: HostState[SuffixText]) -> None:
        state.join(other)
