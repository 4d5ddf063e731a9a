"""Small corpora, their n-gram files, and their distributions by counting.

Legend: V vocabulary.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import VOCAB

from outrider.train.ngram import build_ngram

_FOLDER = tempfile.TemporaryDirectory()


def corpus(num_tokens: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Documents in which few tokens are frequent, the last one never occurs, and a token depends
    on the preceding one."""
    generator = np.random.default_rng(seed)
    p_V = 1.0 / np.arange(1, num_tokens) ** 1.5
    documents = []
    for length in lengths:
        ids = [0]
        for x in generator.choice(num_tokens - 1, length, p=p_V / p_V.sum()):
            ids.append(int(x if x % 2 else (ids[-1] + x) % (num_tokens - 1)))
        documents.append(ids[1:])
    return documents


def ngram_file(documents: Sequence[Sequence[int]], num_tokens: int, **settings: Any) -> Path:
    """An n-gram file of these documents, deleted when the tests end."""
    file = Path(_FOLDER.name) / f"{len(list(Path(_FOLDER.name).iterdir()))}.safetensors"
    build_ngram(file, documents, num_tokens, **settings)
    return file


@cache
def tiny_file(num_tokens: int = VOCAB, order: int = 4) -> str:
    """An n-gram file for the tiny models."""
    return str(ngram_file(corpus(num_tokens, [400, 50, 3]), num_tokens, order=order))


class Counts:
    """The distribution that a file should have, counted in plain Python."""

    def __init__(
        self, documents: Sequence[Sequence[int]], num_tokens: int, order: int, min_count: int = 1
    ) -> None:
        self.num_tokens, self.order, self.min_count = num_tokens, order, min_count
        self.counts = [
            Counter(tuple(d[i : i + k]) for d in documents for i in range(len(d) - k + 1))
            for k in range(order + 1)
        ]

    def distribution(self, context: Sequence[int]) -> list[float]:
        """q( . | context), by the formulas of the builder's docstring."""
        h = tuple(context)[max(0, len(context) - self.order + 1) :]
        while h and not self._kept(h):
            h = h[1:]
        k = len(h) + 1
        d = self._discount(k)
        if not h:
            total = sum(self.counts[1].values())
            shares = [max(self.counts[1][(x,)] - d, 0) / total for x in range(self.num_tokens)]
            return [m + (1 - sum(shares)) / self.num_tokens for m in shares]
        longer = [self.counts[k][(*h, x)] for x in range(self.num_tokens)]
        shares = [
            _rounded_down((c - d) / self.counts[k - 1][h]) if c >= self.min_count else 0.0
            for c in longer
        ]
        return [
            m + (1 - sum(shares)) * q for m, q in zip(shares, self.distribution(h[1:]), strict=True)
        ]

    def _kept(self, gram: tuple[int, ...]) -> bool:
        return self.counts[len(gram)][gram] >= (1 if len(gram) == 1 else self.min_count)

    def _discount(self, k: int) -> float:
        seen = [c for g, c in self.counts[k].items() if k == 1 or self._kept(g[:-1])]
        return min(max(seen.count(1) / max(seen.count(1) + 2 * seen.count(2), 1), 0.1), 0.9)


def _rounded_down(x: float) -> float:
    nearest = np.float16(x)
    return float(nearest if float(nearest) <= x else np.nextafter(nearest, np.float16(0)))
