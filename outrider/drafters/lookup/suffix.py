"""Suffix decoding: drafts the most frequent continuation of the longest matching suffix, found in
the request itself or in earlier outputs.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS
2025, https://arxiv.org/abs/2411.04975; Hu et al., "SAM Decoding: Speculative Decoding via Suffix
Automaton", ACL 2025, https://arxiv.org/abs/2411.10666, for the automaton in place of a tree.

    s      = the longest suffix of the row that occurred before, m tokens long
    f(x|s) = occurrences of s followed by x  /  occurrences of s followed by any token
    P(v)   = Π f along the path from s to node v
    draft  = the nodes with the largest P, at most α m of them;   score = Σ P

One automaton indexes the request, two others the outputs of requests that have ended. Each offers a
draft; the one with the largest score, the expected number of accepted tokens, is taken. Nodes whose
P is below ``min_prob`` are left out. In a chain each node has only its most frequent successor.

The paper tries all suffixes in a tree of bounded depth and takes the best score; here each
automaton offers its longest match, of any length. Of a state with more than ``MAX_CHILDREN``
different continuations (``suffix_index``), only the newest ones and the first are considered.

The corpus is shared by all requests of a drafter, so a request's drafts depend on which others
ended before it. Under the rule ``Coupled``, which the method uses, the output does not depend on
them; under another lossless rule the output changes, though its distribution does not.

Proposes: chosen chains or trees.

Legend: B rows, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, get_args

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Scores, Stream, Verdict
from outrider.core.errors import InvalidParameterError
from outrider.drafters.lookup.host import HostState, Tree, chain, trees
from outrider.drafters.lookup.suffix_corpus import Corpus, Cursor
from outrider.drafters.lookup.suffix_index import SEPARATOR, SuffixIndex

Shape = Literal["chain", "tree"]
DEPTH = 16
TREE_WIDTH = 4
TREE_NODES = 16
MAX_NODES = 1024
NOTHING = Tree([], ())


@dataclass(frozen=True)
class Expand:
    """Turns the continuations of an automaton's state into a draft.

    Attributes:
        shape: ``chain`` or ``tree``.
        factor: α, nodes per matched token.
        min_prob: nodes with a smaller P are left out.
    """

    shape: Shape
    factor: float
    min_prob: float

    def bound(self, matched: int, most: int) -> float:
        """An upper bound of the score after a match: 1 per node, and 1 per level."""
        return min(self.factor * matched, most)

    def __call__(
        self, index: SuffixIndex, state: int, matched: int, most: int
    ) -> tuple[float, Tree]:
        """The score and the draft after a state, at most ``most`` levels deep."""
        left = int(min(self.factor * matched, MAX_NODES))
        if self.shape == "chain":
            return _chain(index, state, min(left, most), self.min_prob)
        return _tree(index, state, min(left, TREE_NODES), most, self.min_prob)


def _chain(index: SuffixIndex, state: int, left: int, min_prob: float) -> tuple[float, Tree]:
    """The most probable path, and its score."""
    count, end, known = index.count, index.end, index.tokens
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    while left > 0 and (child := index.likeliest_child(state)):
        followed = index.num_followed(state)
        occurrences, position = count[child], end[child]
        if occurrences < followed:
            prob *= occurrences / followed
        token = known[position - 1]
        if min_prob > prob or token == SEPARATOR:
            break
        tokens.append(token)
        score += prob
        left -= 1
        if occurrences == 1:  # from here on there is one path: the tokens at that position
            run = known[position : position + left]
            if SEPARATOR in run:
                run = run[: run.index(SEPARATOR)]
            tokens.extend(run)
            score += prob * len(run)
            break
        state = child
    return score, Tree.chain(tokens)


def _tree(
    index: SuffixIndex, state: int, left: int, most: int, min_prob: float
) -> tuple[float, Tree]:
    """The most probable nodes, best first, and their score."""
    tokens: list[int] = []
    parents: list[int] = []
    count, end, known = index.count, index.end, index.tokens
    score, prob, node, depth, num = 0.0, 1.0, 0, 0, 0
    waiting: list[tuple[float, int, int, int, int]] = []
    while left > 0:
        if depth < most:
            followed = index.num_followed(state)
            for child in index.likeliest_children(state, TREE_WIDTH):
                share = prob * min(count[child] / followed, 1.0)
                if min_prob <= share and known[end[child] - 1] != SEPARATOR:
                    heappush(waiting, (-share, num, child, node, depth + 1))
                    num += 1
        if not waiting:
            break
        negative, _, state, parent, depth = heappop(waiting)
        prob = -negative
        score += prob
        left -= 1
        tokens.append(known[end[state] - 1])
        parents.append(parent)
        node = len(tokens)
    return score, Tree(tokens, parents)


class SuffixReader:
    """One row's automaton, and the row's cursors in the automata of the corpus.

    Args:
        corpus: earlier outputs, shared by all rows.
        begin: position at which the row's output begins.
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
        """Undoes the last ``num`` tokens; rebuilds the automaton if it cannot undo as many."""
        self._cursors = []  # the next draft makes new ones
        if num <= self.index.num_forgettable:
            self.index.forget(num)
            return
        kept = self.index.tokens[: len(self.index.tokens) - num]
        self.index = SuffixIndex()
        self.index.extend(kept)

    def close(self) -> None:
        """Adds the row's output to the corpus."""
        with self._corpus.lock:
            self._corpus.add(self.index.tokens[self._begin :])

    def continuation(self, expand: Expand, most: int) -> Tree:
        """The draft with the best score, the first of equal ones. Longer matches are tried first,
        and matches whose bound does not exceed the best score are skipped."""
        with self._corpus.lock:
            return self._best(expand, most)

    def _best(self, expand: Expand, most: int) -> Tree:
        self._cursors = self._corpus.cursors(self._cursors, self.index.tokens)
        state = max(self.index.link[self.index.last], 0)
        if not self._cursors:
            return expand(self.index, state, self.index.length[state], most)[1]
        matches = [(self.index.length[state], 0, self.index, state)]
        for i, cursor in enumerate(self._cursors, 1):
            matches.append((cursor.matched, -i, cursor.index, cursor.state()))
        best, tree = (0.0, 0), NOTHING
        for matched, order, index, state in sorted(matches, reverse=True):
            if (expand.bound(matched, most), order) > best:
                score, offer = expand(index, state, matched, most)
                if (score, order) > best:
                    best, tree = (score, order), offer
        return tree


class SuffixDecoding:
    """Drafts the most probable continuations of the longest match.

    Args:
        shape: ``chain`` or ``tree``.
        factor: α, nodes per matched token; a tree has at most 16.
        min_prob: nodes with a smaller P are not drafted.
        corpus_tokens: most tokens kept of the outputs of ended requests; 0 keeps none.

    Raises:
        InvalidParameterError: a number outside its range, another shape.
    """

    drawn: Drawn = "chosen"

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
        self.corpus = Corpus(corpus_tokens)
        self._expand = Expand(shape, factor, min_prob)

    @property
    def capabilities(self) -> Capabilities:
        if self.shape == "chain":
            return Capabilities(depth=DEPTH, rewindable=True)
        return Capabilities(
            depth=DEPTH,
            max_nodes=lambda num_tokens: TREE_NODES + 1,
            drafts_trees=True,
            rewindable=True,
        )

    def start(self, context: Context) -> HostState[SuffixReader]:
        sources = context.sources or [()] * context.num_rows
        begins = [len(s) + n for s, n in zip(sources, context.lengths, strict=True)]
        return HostState(context, lambda row: SuffixReader(self.corpus, begins[row]))

    def propose(
        self, state: HostState[SuffixReader], context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        state.catch_up()
        most = budget.max_tokens
        found = [reader.continuation(self._expand, most) for reader in state.readers]
        if self.shape == "tree":
            return trees(state, found, budget)
        return chain(state, [tree.tokens for tree in found], budget)

    def commit(
        self, state: HostState[SuffixReader], draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Does nothing: the next ``propose`` reads what was committed."""

    def forget_outputs(self) -> None:
        """Empties the corpus."""
        with self.corpus.lock:
            self.corpus.clear()

    def join(self, state: HostState[SuffixReader], other: HostState[SuffixReader]) -> None:
        state.join(other)
