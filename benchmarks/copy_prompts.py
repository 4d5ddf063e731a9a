"""Prompts of three kinds of text, made from the corpus: the standard library's held-out files.

    edit     a function, and the beginning of a copy in which one name is another throughout
    repeat   a function, and the beginning of a copy under another name
    code     the beginning of a file
    free     the beginning of a docstring of several sentences

The first two come with the text that belongs there. The embedded target is too small to write it
by itself, so a benchmark of copying makes it the target's text by ``Sampling.forced``: the passes
are as they are, only the distribution is a point mass. What a model that can copy would gain is
measured thereby, and what this one gains by itself stands in the other kinds.
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
    """A prompt, and what is to be written there; "" where that is the model's own business."""

    text: str
    reference: str = ""


def prompts(kind: Kind, num: int) -> list[Prompt]:
    """That many prompts, spread over the files; fewer if there are no more."""
    found = list(_MAKERS[kind](documents()))
    return found[:: max(len(found) // num, 1)][:num]


@lru_cache(maxsize=1)
def documents() -> tuple[Document, ...]:
    """The held-out files that are programs, not tables."""
    (source,) = collect([STDLIB])
    held_out = (document for document in source.documents if document.held_out)
    return tuple(document for document in held_out if not document.name.startswith("encodings"))


def _functions(documents: tuple[Document, ...]) -> Iterator[tuple[str, str]]:
    """Names and sources of functions of middling length."""
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
    """The function and the first lines of its copy."""
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
