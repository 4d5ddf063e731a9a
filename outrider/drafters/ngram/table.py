"""An n-gram model in one file: its layout, how it is read, what can be asked of it.

    q(x | h) = m(hx) + ρ(h) q(x | h'),      ρ(h) = 1 - Σ_y m(hy)

h is a context of up to n-1 tokens, h' the same without its first token, and m(hx) the share of h's
mass that the file gives to x directly: whatever the builder's smoothing, this is a normalised
distribution, over the whole vocabulary. What the file does not hold of a context goes to the
shorter one.

The file is one safetensors file, memory-mapped: what is never asked for is never kept in memory.
Grams are nodes of a trie, numbered by order; those of order 1 are the tokens themselves.

    unigram     (V,)      float32  q(x), no context
    tokens.k    (G_k,)    uint16   last token of each k-gram, 2 ≤ k ≤ n (uint32 from 65,536 tokens
                                   on); sorted by the (k-1)-gram before it, then by token
    shares.k    (G_k,)    float16  m
    first.k     (G_k+1,)  uint32   k-gram g goes on with the (k+1)-grams first[g] … first[g+1]-1
    best.k      (G_k,)    as tokens  argmax_x q(x | g); both for 1 ≤ k < n

Its metadata names format, version, order and vocabulary, and the CRC-32 of all of it, which is
checked when the file is opened: one reading, at more than a gigabyte a second.

Legend: V vocabulary, G_k grams of order k.
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
    """What a file says of itself.

    Attributes:
        order: n, the longest gram.
        num_tokens: V.
        vocabulary: digest of the tokenizer's mapping; empty if there was no tokenizer.
        trained_on: tokens that were counted.
    """

    order: int
    num_tokens: int
    vocabulary: str = ""
    trained_on: int = 0


class NgramTable:
    """The distributions of an n-gram file. A context is a list of nodes: of its last 1, 2, …
    tokens, as far as the file has them.

    Args:
        about: what the file says of itself.
        arrays: its tensors by name.
        order: the longest grams to use; None for all that there are.

    Raises:
        InvalidParameterError: an order that the file has not.
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
        searched = [_numbers(tokens) for tokens in self._tokens[:-1]]  # contexts are no longer
        self._longer = tuple(zip(self._first, searched, strict=False))
        self._best = [_numbers(arrays[f"best.{k}"]) for k in range(1, self.order)]
        self._best_alone = int(self.unigram_V.argmax())

    @classmethod
    def open(cls, file: str | Path, order: int | None = None) -> "NgramTable":
        """Maps a file into memory and verifies it.

        Raises:
            ModelLoadError: a file that is missing, no n-gram file, cut short or damaged.
            InvalidParameterError: an order that it has not.
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
        """The context one token later. A few binary searches; no array is touched."""
        if self.order == 1 or token >= self.about.num_tokens:
            return []
        after = [token]
        for node, (first, tokens) in zip(nodes, self._longer, strict=False):
            end = first[node + 1]
            child = bisect_left(tokens, token, first[node], end)
            if child == end or tokens[child] != token:
                break  # then no longer gram with the same ending is there either
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
            share = float(shares_C[tokens_C == token].sum())  # of one token, or of none
            q = share + (1 - float(shares_C.sum())) * q
        return q

    def distribution(self, nodes: Sequence[int], out: Array | None = None) -> Array:
        """q( . | context), shape (V,): one multiplication of the unigram distribution, and the few
        tokens that each gram goes on with.

        Args:
            nodes: the context.
            out: where to write it, in float32 or float64; None for a new array in float64.
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
    """Its numbers one at a time, which a memoryview reads much faster than an array does."""
    return memoryview(array)


def write_table(file: str | Path, about: About, arrays: Mapping[str, Array]) -> None:
    """Writes an n-gram file, the same bytes each time; who has the old one open keeps it."""
    said = asdict(about) | {"version": VERSION, "crc32": _checksum(asdict(about), arrays)}
    path = Path(os.path.expanduser(file))
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(save(dict(arrays), {FORMAT: json.dumps(said)}))
    os.replace(unfinished, path)


def _checked(metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> About:
    """What the file says of itself, if that is true. Raises ModelLoadError."""
    if FORMAT not in metadata:
        raise ModelLoadError("it holds no n-gram model")
    try:
        said = json.loads(metadata[FORMAT])
        version, crc32 = said.pop("version"), said.pop("crc32")
        about = About(**said)
    except (ValueError, TypeError, KeyError):
        raise ModelLoadError("it is damaged: what it says of itself cannot be read") from None
    if version != VERSION:
        raise ModelLoadError(f"its version is {version}, this package reads version {VERSION}")
    if crc32 != _checksum(said, arrays):
        raise ModelLoadError("it is damaged: its checksum is not that of its contents")
    return about


def _checksum(about: Mapping[str, object], arrays: Mapping[str, Array]) -> str:
    shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    crc = zlib.crc32(json.dumps([about, shapes], sort_keys=True).encode())
    for name in sorted(arrays):
        crc = zlib.crc32(_numbers(np.ascontiguousarray(arrays[name]).view(np.uint8)), crc)
    return f"{crc:08x}"
