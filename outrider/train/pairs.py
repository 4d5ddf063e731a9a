"""Training pairs for encoder-decoders, a source and its target text, as rows of equal width.

A row is a source padded to its width, followed by a text that ends in the end token, also padded.
So a batch is a single tensor, as the training loop expects, and a pure function of the step. The
pairs of this module come from source code: a function's signature with annotations and defaults,
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
"""The token that begins every text and pads every row."""
END = 1
"""The token that ends every text."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Signature:
    """A function's name, its arguments as declared and as passed, and its return annotation."""

    name: str
    arguments: tuple[Pair, ...]
    returns: str = ""

    @property
    def pair(self) -> Pair:
        """Source and text, such as ``def f(a: int, *b, c=3) -> str`` and ``f(a, *b, c)``."""
        declared = ", ".join(declared for declared, _ in self.arguments)
        passed = ", ".join(passed for _, passed in self.arguments)
        arrow = f" -> {self.returns}" if self.returns else ""
        return f"def {self.name}({declared}){arrow}", f"{self.name}({passed})"


def signatures(text: str) -> Iterator[Signature]:
    """The signature of each function in a Python file; none if the file does not parse.

    A ``/`` or a bare ``*`` in the parameter list is dropped.
    """
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
    """Random signatures made of the parts of others, which a model can copy but not memorise.

    Args:
        found: signatures whose parts are used.
        num: number of new signatures.
        seed: of the random choices.
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
    """Encodes pairs as rows, (P, S + T) in uint16; pairs that exceed the widths are left out."""
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
    """`batches(step)` is the [B, S+T] int64 batch of that step.

    Each epoch visits the rows in an order shuffled by (seed, epoch).
    """

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
        per_epoch = len(self.rows) // self.batch_size
        epoch, index = divmod(step, per_epoch)
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = generator.permutation(len(self.rows))
        chosen = order[index * self.batch_size :][: self.batch_size]
        return torch.from_numpy(self.rows[chosen].astype(np.int64))
