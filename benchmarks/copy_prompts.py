"""Prompts of four kinds of text, made from the held-out files of the standard library.

    edit     a function, and the beginning of a copy in which one name is replaced throughout
    repeat   a function, and the beginning of a copy with another function name
    code     the beginning of a file
    free     the beginning of a docstring of several sentences

The first two kinds come with a reference continuation. The embedded target is too small to produce
it, so benchmarks of copying force it by ``Sampling.forced``: forward passes are unchanged, but the
distribution is a point mass. This measures the gain of a model that can copy. The other kinds
measure the gain of the embedded target itself.
"""

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from outrider.train.corpus import STDLIB, Document, collect

Kind = Literal["edit", "repeat", "code", "free"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FUNCTION_LINES = range(8, 25)
HEAD_LINES = 2
FILE_LINES = 30
FREE_WORDS = 40


@dataclass(frozen=True)
class Prompt:
    """A prompt and its reference continuation; "" if the model continues it freely."""

    text: str
    reference: str = ""


def prompts(kind: Kind, num: int) -> list[Prompt]:
    """At most ``num`` prompts of a kind, spread evenly over the files."""
    found = list(_MAKERS[kind](documents()))
    return found[:: max(len(found) // num, 1)][:num]


@lru_cache(maxsize=1)
def documents() -> tuple[Document, ...]:
    """The held-out files, without the tables of the ``encodings`` package."""
    (source,) = collect([STDLIB])
    held_out = (document for document in source.documents if document.held_out)
    return tuple(document for document in held_out if not document.name.startswith("encodings"))


def _functions(documents: tuple[Document, ...]) -> Iterator[tuple[str, str]]:
    """Names and sources of functions of medium length."""
    for document in documents:
        lines = document.text.splitlines()
        for node in ast.walk(ast.parse(document.text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                source = lines[node.lineno - 1 : node.end_lineno]
                if len(source) in FUNCTION_LINES:
                    yield node.name, textwrap.dedent("\n".join(source))


def _renamed(source: str, name: str) -> str:
    return re.sub(rf"\b{re.escape(name)}\b", f"{name}_new", source)


def _begun(source: str, copy: str) -> Prompt:
    """A prompt of a function and the first lines of its copy; the rest is the reference."""
    lines = copy.splitlines(keepends=True)
    head, rest = "".join(lines[:HEAD_LINES]), "".join(lines[HEAD_LINES:])
    return Prompt(f"{source}\n\n\n{head}", rest)


def _edits(documents: tuple[Document, ...]) -> Iterator[Prompt]:
    for _, source in _functions(documents):
        names = Counter(
            node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)
        )
        names.pop("self", None)
        if names:
            yield _begun(source, _renamed(source, names.most_common(1)[0][0]))


def _repeats(documents: tuple[Document, ...]) -> Iterator[Prompt]:
    for name, source in _functions(documents):
        yield _begun(source, _renamed(source, name))


def _files(documents: tuple[Document, ...]) -> Iterator[Prompt]:
    for document in documents:
        lines = document.text.splitlines(keepends=True)
        for begin in range(0, len(lines) - FILE_LINES, 4 * FILE_LINES):
            yield Prompt("".join(lines[begin : begin + FILE_LINES]))


def _prose(documents: tuple[Document, ...]) -> Iterator[Prompt]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for document in documents:
        for node in ast.walk(ast.parse(document.text)):
            words = (ast.get_docstring(node) or "").split() if isinstance(node, kinds) else []
            if len(words) >= FREE_WORDS:
                yield Prompt(textwrap.fill(" ".join(words[:FREE_WORDS]), 72))


_MAKERS = {"edit": _edits, "repeat": _repeats, "code": _files, "free": _prose}
