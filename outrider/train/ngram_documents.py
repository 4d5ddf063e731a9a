"""What an n-gram table may be built from: texts, data sets, a model's own samples.

All of it comes as documents, lists of token ids, and is read as it is needed.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.drafters.ngram.table import MAX_ORDER
from outrider.engine import Engine
from outrider.sampling import Sampling

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
_BATCH = 64
_LONG_FILE = 1 << 20


def encoded(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """Each text as a prompt would be encoded, with the end-of-text token behind it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = iter(texts)
    while batch := list(islice(texts, _BATCH)):
        for ids in tokenizer(batch, verbose=False)["input_ids"]:
            yield ids if ids[-1:] == end else [*ids, *end]


def read_texts(paths: Iterable[str | Path]) -> Iterator[str]:
    """The texts of files, JSON lines and folders of them.

    A line of a ``.jsonl`` file is one text, its ``"text"``; any other file is one, or several of
    whole lines if it is long. Folders are searched for ``SUFFIXES``, in the order of their paths.

    Raises:
        InvalidParameterError: a path that is not there or cannot be read, a line without a text.
    """
    for path in map(Path, paths):
        if path.is_dir():
            found = (file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            yield from read_texts(sorted(found))
            continue
        try:
            with open(path, encoding="utf-8", errors="replace") as lines:
                yield from _from_json(lines, path) if path.suffix == ".jsonl" else _pieces(lines)
        except OSError as error:
            raise InvalidParameterError(
                f"text {str(path)!r}: cannot be read ({error.strerror or error})"
            ) from error


def samples(
    engine: Engine, num_tokens: int, sampling: Sampling, prompts: Sequence[str | Sequence[int]]
) -> Iterator[list[int]]:
    """Texts that the engine writes behind the prompts, in turn: that many tokens in all.

    The last text is cut where the number is reached. A document begins with the last tokens of its
    prompt, which are context and come on top.
    """
    left, typical, seed, waiting = (
        num_tokens,
        sampling.max_new_tokens,
        sampling.seed,
        cycle(prompts),
    )
    while left > 0:
        rows = min(engine.max_batch_size, ceil(left / typical))
        results = engine.generate(list(islice(waiting, rows)), replace(sampling, seed=seed))
        for result in results:
            written = result.token_ids[:left]
            left -= len(written)
            if written:
                yield [*result.prompt_ids[-MAX_ORDER + 1 :], *written]
        typical = max(1, sum(len(result.token_ids) for result in results) // rows)
        seed += 1


def _from_json(lines: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["text"] if line.strip() else ""
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise InvalidParameterError(
                f"text {str(path)!r}, line {number}: no JSON object with a 'text', such as "
                f'{{"text": "def f(x):"}}'
            )
        if text:
            yield text


def _pieces(lines: Any) -> Iterator[str]:
    while piece := lines.readlines(_LONG_FILE):
        yield "".join(piece)
