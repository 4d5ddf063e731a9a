"""Pairs of texts, a source and what to write for it, as rows of tokens of one width.

A row is a source, padded to its width, and behind it a text that ends in the end token, padded
likewise; so a batch is one tensor, as the training loop wants it, and a pure function of the step.
The pairs made here come from source code: a function's signature with its annotations and defaults,
and the bare call.

Shapes: B rows, S tokens of a source, T tokens of a text, P pairs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = 0
"""Begins every text and fills every row; the end token is the next one."""
END = 1

Pair = tuple[str, str]


@dataclass(frozen=True)
class Signature:
    """A function's name, its arguments as declared and as passed, and what it returns."""

    name: str
    arguments: tuple[Pair, ...]
    returns: str = ""

    @property
    def pair(self) -> Pair:
        """``def f(a: int, *b, c=3) -> str`` and ``f(a, *b, c)``."""
        declared = ", ".join(declared for declared, _ in self.arguments)
        passed = ", ".join(passed for _, passed in self.arguments)
        arrow = f" -> {self.returns}" if self.returns else ""
        return f"def {self.name}({declared}){arrow}", f"{self.name}({passed})"


def signatures(text: str) -> Iterator[Signature]:
    """Of each function of a Python file; those that only a ``/`` or a bare ``*`` tells apart are
    taken for one. Files that do not parse have none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            returns = "" if node.returns is None else ast.unparse(node.returns)
            yield Signature(node.name, tuple(_arguments(node.args)), returns)


def _arguments(arguments: ast.arguments) -> Iterator[Pair]:
    plain = [*arguments.posonlyargs, *arguments.args]
    lacking: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    for argument, default in zip(plain, [*lacking, *arguments.defaults], strict=True):
        yield _argument(argument, default)
    if arguments.vararg:
        yield _argument(arguments.vararg, None, "*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield _argument(arguments.kwarg, None, "**")


def _argument(argument: ast.arg, default: ast.expr | None, stars: str = "") -> Pair:
    end = "" if default is None else f"={ast.unparse(default)}"
    return f"{stars}{ast.unparse(argument)}{end}", f"{stars}{argument.arg}"


def recombined(found: Sequence[Signature], num: int, seed: int) -> Iterator[Signature]:
    """Signatures of parts drawn from others, which cannot be written from memory.

    Args:
        found: what parts are taken from.
        num: how many.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    arguments = [argument for signature in found for argument in signature.arguments]
    for _ in range(num):
        first, second, third = (found[i] for i in generator.integers(len(found), size=3))
        chosen = generator.integers(len(arguments), size=len(second.arguments))
        yield Signature(first.name, tuple(arguments[i] for i in chosen), third.returns)


def encode_pairs(
    pairs: Iterable[Pair], tokenizer: PreTrainedTokenizerFast, source_width: int, text_width: int
) -> np.ndarray:
    """Rows (P, S + T) of uint16; a pair that is too long for its widths is left out."""
    listed = list(pairs)
    if not listed:
        return np.zeros((0, source_width + text_width), dtype=np.uint16)
    sources = tokenizer([source for source, _ in listed], add_special_tokens=False)["input_ids"]
    texts = tokenizer([text for _, text in listed], add_special_tokens=False)["input_ids"]
    kept = [
        (source, [*text, END])
        for source, text in zip(sources, texts, strict=True)
        if len(source) <= source_width and len(text) < text_width
    ]
    rows = np.full((len(kept), source_width + text_width), PAD, dtype=np.uint16)
    for row, (source, text) in zip(rows, kept, strict=True):
        row[: len(source)] = source
        row[source_width : source_width + len(text)] = text
    return rows


@dataclass(frozen=True)
class PairBatches:
    """`batches(step)` is the [B, S+T] int64 batch of that step; each pass over the rows is in an
    order shuffled by (seed, pass)."""

    rows: np.ndarray
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.rows) < self.batch_size:
            raise ValueError(
                f"{len(self.rows)} pairs are too few for batches of {self.batch_size}; "
                "give more of them, or a smaller batch"
            )

    def __call__(self, step: int) -> Tensor:
        per_pass = len(self.rows) // self.batch_size
        epoch, place = divmod(step, per_pass)
        order = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        chosen = order.permutation(len(self.rows))[place * self.batch_size :][: self.batch_size]
        return torch.from_numpy(self.rows[chosen].astype(np.int64))
