"""An n-gram model in one file: the file's layout, reading it, and the model's distributions.

    q(x | h) = m(hx) + ρ(h) q(x | h'),      ρ(h) = 1 - Σ_y m(hy)

h is a context of up to n-1 tokens, h' the same without its first token, and m(hx) the share of h's
probability mass that the file gives to x directly. The remaining mass goes to the shorter context.
So q is a normalised distribution over the whole vocabulary, whatever smoothing the builder used.

The file is one memory-mapped safetensors file, so that only the pages that are read take memory.
Grams are nodes of a trie, numbered within their order; those of order 1 are the tokens themselves.

    unigram     (V,)      float32  q(x) without a context
    tokens.k    (G_k,)    uint16   last token of each k-gram, 2 ≤ k ≤ n (uint32 from 65,536 tokens
                                   on); sorted by the (k-1)-gram before it, then by token
    shares.k    (G_k,)    float16  m
    first.k     (G_k+1,)  uint32   the children of k-gram g: (k+1)-grams first[g] … first[g+1]-1
    best.k      (G_k,)    as tokens  argmax_x q(x | g); both for 1 ≤ k < n

The metadata holds format, version, order, vocabulary and a CRC-32 of everything, which is checked
when the file is opened, at more than a gigabyte per second.

Legend: V vocabulary, G_k grams of order k, C children of a gram.
"""

import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from outrider.core.errors import InvalidParameterError, ModelLoadError

FORMAT, VERSION = "outrider-ngram", 1
MAX_ORDER = 5
BUILD = "build one with `outrider ngram build`"

Array = NDArray[Any]


@dataclass(frozen=True)
class About:
    """A file's metadata.

    Attributes:
        order: n, the length of the longest grams.
        num_tokens: V.
        vocabulary: digest of the tokenizer's mapping; empty if there was no tokenizer.
        trained_on: number of tokens that were counted.
    """

    order: int
    num_tokens: int
    vocabulary: str = ""
    trained_on: int = 0


class NgramTable:
    """The distributions of an n-gram file.

    A context is represented by a list of nodes: the grams of its last 1, 2, … tokens, as many as
    the file contains.

    Args:
        about: the file's metadata.
        arrays: its tensors by name.
        order: length of the longest grams to use; None for the file's own order.

    Raises:
        InvalidParameterError: an order that the file does not have.
    """

    def __init__(self, about: About, arrays: Mapping[str, Array], order: int | None = None) -> None:
        if order is not None and not 1 <= order <= about.order:
            raise InvalidParameterError(
                f"order={order}: the n-gram file has orders 1 to {about.order}; build a longer one "
                f"with `outrider ngram build --order {min(max(order, 1), MAX_ORDER)}`"
            )
        self.about = about
        self.order = about.order if order is None else order
        self.unigram_V = arrays["unigram"]
        self._tokens = [arrays[f"tokens.{k}"] for k in range(2, self.order + 1)]
        self._shares = [arrays[f"shares.{k}"] for k in range(2, self.order + 1)]
        self._first = [_numbers(arrays[f"first.{k}"]) for k in range(1, self.order)]
        searched = [_numbers(tokens) for tokens in self._tokens[:-1]]  # contexts have n-1 tokens
        self._longer = tuple(zip(self._first, searched, strict=False))
        self._best = [_numbers(arrays[f"best.{k}"]) for k in range(1, self.order)]
        self._best_alone = int(self.unigram_V.argmax())

    @classmethod
    def open(cls, file: str | Path, order: int | None = None) -> "NgramTable":
        """Maps a file into memory and checks it.

        Raises:
            ModelLoadError: a file that is missing, no n-gram file, truncated or damaged.
            InvalidParameterError: an order that the file does not have.
        """
        path = Path(os.path.expanduser(file))
        if not os.path.isfile(path):
            raise ModelLoadError(f"n-gram file {str(file)!r}: no such file; {BUILD}")
        try:
            with safe_open(path, "pt") as opened:
                metadata = opened.metadata() or {}
                arrays = {name: opened.get_tensor(name).numpy() for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ModelLoadError(
                f"n-gram file {str(file)!r}: no safetensors file, or cut short ({error}); {BUILD}"
            ) from error
        try:
            return cls(_checked(metadata, arrays), arrays, order)
        except ModelLoadError as error:
            raise ModelLoadError(f"n-gram file {str(file)!r}: {error}; {BUILD}") from None

    def nodes(self, tokens: Sequence[int]) -> list[int]:
        """The context after these tokens."""
        nodes: list[int] = []
        for token in tokens[max(0, len(tokens) - self.order + 1) :]:
            nodes = self.step(nodes, token)
        return nodes

    def step(self, nodes: Sequence[int], token: int) -> list[int]:
        """The context one token later, by a few binary searches."""
        if self.order == 1 or token >= self.about.num_tokens:
            return []
        after = [token]
        for node, (first, tokens) in zip(nodes, self._longer, strict=False):
            end = first[node + 1]
            child = bisect_left(tokens, token, first[node], end)
            if child == end or tokens[child] != token:
                break  # a longer gram with this ending cannot exist either
            after.append(child)
        return after

    def best(self, nodes: Sequence[int]) -> int:
        """The most probable next token."""
        return int(self._best[len(nodes) - 1][nodes[-1]]) if nodes else self._best_alone

    def probability(self, nodes: Sequence[int], token: int) -> float:
        """q(token | context)."""
        q = float(self.unigram_V[token])
        for level, node in enumerate(nodes):
            tokens_C, shares_C = self._children(level, node)
            share = float(shares_C[tokens_C == token].sum())  # of at most one child
            q = share + (1 - float(shares_C.sum())) * q
        return q

    def distribution(self, nodes: Sequence[int], out: Array | None = None) -> Array:
        """q( . | context), shape (V,): the unigram distribution times a weight, plus the shares of
        each gram's few children.

        Args:
            nodes: the context.
            out: array to write to, float32 or float64; None for a new float64 array.
        """
        parts, weight = [], 1.0
        for level in reversed(range(len(nodes))):
            tokens_C, shares_C = self._children(level, nodes[level])
            rest = weight * (1 - float(shares_C.sum()))
            shares_C *= weight
            parts.append((tokens_C, shares_C))
            weight = rest
        q_V = np.empty(len(self.unigram_V)) if out is None else out
        np.multiply(self.unigram_V, q_V.dtype.type(weight), out=q_V)
        for tokens_C, shares_C in parts:
            q_V[tokens_C] += shares_C
        return q_V

    def _children(self, level: int, node: int) -> tuple[Array, Array]:
        first = self._first[level]
        here = slice(first[node], first[node + 1])
        return self._tokens[level][here], self._shares[level][here].astype(np.float64)


def _numbers(array: Any) -> memoryview:
    """The array as a memoryview, which reads single numbers much faster than numpy does."""
    return memoryview(array)


def write_table(file: str | Path, about: About, arrays: Mapping[str, Array]) -> None:
    """Writes an n-gram file, replacing an old one atomically; equal input gives equal bytes."""
    metadata = asdict(about) | {"version": VERSION, "crc32": _checksum(asdict(about), arrays)}
    path = Path(os.path.expanduser(file))
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(save(dict(arrays), {FORMAT: json.dumps(metadata)}))
    os.replace(unfinished, path)


def _checked(metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> About:
    """The file's metadata, checked against its contents. Raises ModelLoadError."""
    if FORMAT not in metadata:
        raise ModelLoadError("it holds no n-gram model")
    try:
        fields = json.loads(metadata[FORMAT])
        version, crc32 = fields.pop("version"), fields.pop("crc32")
        about = About(**fields)
    except (ValueError, TypeError, KeyError):
        raise ModelLoadError("it is damaged: its metadata cannot be read") from None
    if version != VERSION:
        raise ModelLoadError(f"its version is {version}, this package reads version {VERSION}")
    if crc32 != _checksum(fields, arrays):
        raise ModelLoadError("it is damaged: its checksum is not that of its contents")
    return about


def _checksum(about: Mapping[str, object], arrays: Mapping[str, Array]) -> str:
    shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    crc = zlib.crc32(json.dumps([about, shapes], sort_keys=True).encode())
    for name in sorted(arrays):
        crc = zlib.crc32(_numbers(np.ascontiguousarray(arrays[name]).view(np.uint8)), crc)
    return f"{crc:08x}"
