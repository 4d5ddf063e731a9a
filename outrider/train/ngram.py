"""Builds an n-gram table: counts, discounts, and the most probable continuation of every context.

Interpolated absolute discounting (Ney, Essen and Kneser, "On Structuring Probabilistic Dependences
in Stochastic Language Modelling", Computer Speech and Language 8, 1994):

    q(x | h) = max(c(hx) - D_k, 0) / c(h)  +  ρ(h) q(x | h'),      D_k = n_1 / (n_1 + 2 n_2)

c counts occurrences (those of h include the ends of documents), n_r is the number of k-grams seen r
times after kept contexts, and ρ(h) is the rest of the probability mass, so the distribution is
normalised whatever is left out. Grams seen fewer than ``min_count`` times give their share to the
shorter context. The unigram distribution backs off to the uniform one, so every token of the
vocabulary can be drafted. Shares are rounded down to float16, so ρ is never negative. (Kneser-Ney
would replace the counts of the shorter contexts. The lower orders of a 4-gram file could then not
be used as a bigram model.)

Memory grows with the number of kept grams, not with the corpus, whose tokens are in a temporary
file. Grams of order k are counted for one range of contexts at a time, (k-1)-grams that occur at
about ``_POSITIONS`` positions. These positions are sorted by (context, token). Contexts are
numbered in the same order, so the kept grams of successive ranges are sorted too.

Legend: V vocabulary, T tokens of the corpus, S positions of a range of contexts, G grams of an
order.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InvalidParameterError
from outrider.drafters.ngram.table import MAX_ORDER, About, write_table

_POSITIONS = 1 << 22  # sorted at a time
_CHUNK = 1 << 24  # tokens or grams read at a time
_NONE = 2**32 - 1  # among tokens, a separator of documents; among gram numbers, no gram

Array = NDArray[Any]


@dataclass(frozen=True)
class Grams:
    """The kept grams of one order, sorted by context, then by token.

    Attributes:
        context_G: the number of the gram's context, its first k-1 tokens, among the kept grams of
            order k-1.
        token_G: its last token.
        count_G: its occurrences.
        discount: D of this order.
    """

    context_G: Array
    token_G: Array
    count_G: Array
    discount: float

    @property
    def keys_G(self) -> Array:
        """Context and token as one sortable number."""
        return _keys(self.context_G, self.token_G)


def build_ngram(
    out: str | Path,
    documents: Iterable[Sequence[int]],
    num_tokens: int,
    order: int = 4,
    min_count: int = 1,
    *,
    vocabulary: str = "",
) -> dict[str, Any]:
    """Counts documents and writes the table.

    Args:
        out: the file to write.
        documents: token ids; no gram extends across two documents.
        num_tokens: V; all ids are smaller.
        order: n, 1 to 5.
        min_count: grams of two or more tokens seen less often are left out.
        vocabulary: digest of the tokenizer that produced the ids.

    Returns:
        The number of tokens, of grams by order, and of bytes of the file.

    Raises:
        InvalidParameterError: an order or count out of range, an id outside the vocabulary, or an
            empty corpus.
    """
    if not 1 <= order <= MAX_ORDER:
        raise InvalidParameterError(f"order={order}: must be 1 to {MAX_ORDER}")
    if min_count < 1:
        raise InvalidParameterError(f"min_count={min_count}: must be 1 or more")
    with tempfile.TemporaryDirectory(prefix="outrider-ngram-") as folder:
        tokens_T = _stored(documents, num_tokens, Path(folder) / "tokens")
        count_V = _unigrams(tokens_T, num_tokens)
        levels = list(_levels(tokens_T, count_V, order, min_count, Path(folder)))
    about = About(order, num_tokens, vocabulary, int(count_V.sum()))
    write_table(out, about, _arrays(count_V, levels))
    return {
        "tokens": about.trained_on,
        "grams": [int((count_V > 0).sum()), *(len(grams.token_G) for grams in levels)],
        "bytes": Path(out).expanduser().stat().st_size,
    }


def _stored(documents: Iterable[Sequence[int]], num_tokens: int, file: Path) -> Array:
    """Writes the documents to a file, a separator after each, and maps it."""
    total = 0
    with open(file, "wb") as stream:
        for document in documents:
            ids = np.asarray(document, dtype=np.int64)
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_tokens:
                raise InvalidParameterError(
                    f"token ids {int(ids.min())} to {int(ids.max())}: the vocabulary is 0 to "
                    f"{num_tokens - 1}; use the tokenizer that the ids come from"
                )
            stream.write(np.append(ids, _NONE).astype(np.uint32).tobytes())
            total += len(ids)
    if not total:
        raise InvalidParameterError("the corpus is empty: there is nothing to count")
    return np.memmap(file, dtype=np.uint32, mode="r")


def _unigrams(tokens_T: Array, num_tokens: int) -> Array:
    count_V = np.zeros(num_tokens, dtype=np.int64)
    for chunk in _chunks(len(tokens_T)):
        some_T = tokens_T[chunk]
        count_V += np.bincount(some_T[some_T != _NONE], minlength=num_tokens)
    return count_V


def _levels(
    tokens_T: Array, count_G: Array, order: int, min_count: int, folder: Path
) -> Iterator[Grams]:
    """Yields the kept grams of orders 2, 3, …, and tracks which gram ends at each position."""
    ending_T = tokens_T
    for k in range(2, order + 1):
        longer_T = np.memmap(
            folder / f"ending{k}", dtype=np.uint32, mode="w+", shape=tokens_T.shape
        )
        longer_T[:] = _NONE
        grams = _counted(tokens_T, ending_T, longer_T, count_G, min_count)
        yield grams
        ending_T, count_G = longer_T, grams.count_G


def _counted(
    tokens_T: Array, ending_T: Array, longer_T: Array, context_count_G: Array, min_count: int
) -> Grams:
    """Counts the grams of one order.

    Args:
        tokens_T: the corpus.
        ending_T: number of the context that ends at each position, or ``_NONE``.
        longer_T: filled with the number of the kept gram that ends at each position.
        context_count_G: occurrences of each context.
        min_count: of kept grams.
    """
    found: list[tuple[Array, Array, Array]] = []
    seen = np.zeros(3, dtype=np.int64)  # grams seen three times or more, once, twice
    kept_before = 0
    for low, high in _ranges(context_count_G):
        positions_S = _positions(tokens_T, ending_T, low, high)
        key_S = _keys(ending_T[positions_S - 1], tokens_T[positions_S])
        by_key_S = np.argsort(key_S)
        key_S = key_S[by_key_S]
        is_new_S = np.append(True, key_S[1:] != key_S[:-1])[: len(key_S)]
        start_G = np.flatnonzero(is_new_S)
        count_G = np.diff(start_G, append=len(key_S))
        seen += [np.sum(count_G > 2), np.sum(count_G == 1), np.sum(count_G == 2)]
        keep_G = count_G >= min_count
        number_G = np.where(keep_G, kept_before + np.cumsum(keep_G) - 1, _NONE).astype(np.uint32)
        longer_T[positions_S[by_key_S]] = number_G[np.cumsum(is_new_S) - 1]
        kept_G = key_S[start_G[keep_G]]
        found.append(
            (
                (kept_G >> np.uint64(32)).astype(np.uint32),
                kept_G.astype(np.uint32),
                count_G[keep_G].astype(np.uint32),
            )
        )
        kept_before += int(keep_G.sum())
    _, once, twice = seen.tolist()
    context_G, token_G, count_G = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Grams(context_G, token_G, count_G, _discount(once, twice))


def _ranges(count_G: Array) -> list[tuple[int, int]]:
    """Ranges of contexts with about ``_POSITIONS`` occurrences each."""
    upto_G = np.cumsum(count_G, dtype=np.int64)
    total = int(upto_G[-1]) if len(upto_G) else 0
    cuts = np.searchsorted(upto_G, np.arange(_POSITIONS, total, _POSITIONS)) + 1
    edges = [0, *np.unique(cuts).tolist(), len(count_G)]
    return [(a, b) for a, b in pairwise(edges) if a < b] or [(0, 0)]


def _positions(tokens_T: Array, ending_T: Array, low: int, high: int) -> Array:
    """Positions of the tokens that follow contexts ``low`` to ``high - 1`` within a document."""
    found = []
    for chunk in _chunks(len(tokens_T) - 1):
        context_T = ending_T[chunk]
        follows_T = (context_T >= low) & (context_T < high)
        follows_T &= tokens_T[chunk.start + 1 : chunk.stop + 1] != _NONE
        found.append(np.flatnonzero(follows_T) + chunk.start + 1)
    return np.concatenate(found)


def _discount(once: int, twice: int) -> float:
    """D, limited to 0.1 to 0.9.

    A small corpus may give 0 or 1, which would leave nothing to the shorter context or to the gram.
    """
    return min(max(once / max(once + 2 * twice, 1), 0.1), 0.9)


def _arrays(count_V: Array, levels: Sequence[Grams]) -> dict[str, Array]:
    """The tensors of the table, by increasing order, since each order needs the one before."""
    wide = np.uint16 if len(count_V) < 2**16 else np.uint32
    q_G = _unigram_distribution(count_V)
    arrays: dict[str, Array] = {"unigram": q_G}
    count_G, keys_G = count_V, np.empty(0, dtype=np.uint64)
    ending_G = np.zeros(len(count_V), dtype=np.int64)  # number of each gram without its first token
    best_G, best_q_G = np.array([q_G.argmax()]), np.array([q_G.max()])  # of the shorter contexts
    for k, grams in enumerate(levels, 2):
        context_G, token_G = grams.context_G, grams.token_G
        shares_G = _shares(grams, count_G)
        rest_G = 1 - np.bincount(context_G, shares_G, len(count_G))
        shorter_G = _endings(k, grams, ending_G, keys_G)
        longer_q_G = (shares_G + rest_G[context_G] * q_G[shorter_G]).astype(np.float32)
        best_G, best_q_G = _best(grams, longer_q_G, best_G[ending_G], rest_G * best_q_G[ending_G])
        num_longer_G = np.bincount(context_G, minlength=len(count_G))
        arrays[f"tokens.{k}"] = token_G.astype(wide)
        arrays[f"shares.{k}"] = shares_G
        arrays[f"first.{k - 1}"] = np.append(0, num_longer_G.cumsum()).astype(np.uint32)
        arrays[f"best.{k - 1}"] = best_G.astype(wide)
        count_G, q_G, ending_G, keys_G = grams.count_G, longer_q_G, shorter_G, grams.keys_G
    return arrays


def _unigram_distribution(count_V: Array) -> Array:
    discount = _discount(int(np.sum(count_V == 1)), int(np.sum(count_V == 2)))
    q_V = np.maximum(count_V - discount, 0) / count_V.sum()
    return (q_V + (1 - q_V.sum()) / len(q_V)).astype(np.float32)


def _shares(grams: Grams, context_count_G: Array) -> Array:
    """(c(hx) - D) / c(h), rounded down to float16."""
    exact_G = (grams.count_G - grams.discount) / context_count_G[grams.context_G]
    shares_G = exact_G.astype(np.float16)
    too_large_G = shares_G > exact_G
    shares_G[too_large_G] = np.nextafter(shares_G[too_large_G], np.float16(0))
    return shares_G


def _endings(k: int, grams: Grams, ending_G: Array, keys_G: Array) -> Array:
    """The number of each k-gram without its first token.

    That is a kept gram too, since it occurs wherever the longer gram does.
    """
    if k == 2:
        return grams.token_G.astype(np.int64)
    shorter_G = np.empty(len(grams.token_G), dtype=np.int64)
    for chunk in _chunks(len(shorter_G)):
        wanted = _keys(ending_G[grams.context_G[chunk]], grams.token_G[chunk])
        shorter_G[chunk] = np.searchsorted(keys_G, wanted)
    return shorter_G


def _best(grams: Grams, q_G: Array, best_G: Array, best_q_G: Array) -> tuple[Array, Array]:
    """The most probable token of each context, and its probability.

    Args:
        grams: the contexts with the tokens seen after them.
        q_G: the probability of each gram's last token.
        best_G: the best token of each context's shorter context.
        best_q_G: its probability if it was not seen after the longer context.
    """
    best_G, best_q_G = best_G.copy(), best_q_G.copy()
    np.maximum.at(best_q_G, grams.context_G, q_G)
    is_best_G = q_G >= best_q_G[grams.context_G]
    # Assigned in reverse, so that the first of equally probable tokens remains.
    best_G[grams.context_G[is_best_G][::-1]] = grams.token_G[is_best_G][::-1]
    return best_G, best_q_G


def _keys(context: Array, token: Array) -> Array:
    return (context.astype(np.uint64) << np.uint64(32)) | token.astype(np.uint64)


def _chunks(num: int) -> Iterator[slice]:
    """Slices of at most ``_CHUNK`` elements; at least one slice."""
    for first in range(0, max(num, 1), _CHUNK):
        yield slice(first, min(first + _CHUNK, num))
