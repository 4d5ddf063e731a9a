"""Documents for n-gram tables: from text files, JSON lines, or a model's own samples.

A document is a list of token ids. All sources are iterators, so documents are read as needed.
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
    """Each text, encoded like a prompt and followed by the end-of-text token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = iter(texts)
    while batch := list(islice(texts, _BATCH)):
        for ids in tokenizer(batch, verbose=False)["input_ids"]:
            yield ids if ids[-1:] == end else [*ids, *end]


def read_texts(paths: Iterable[str | Path]) -> Iterator[str]:
    """The texts in files and folders.

    Every line of a ``.jsonl`` file is an object whose ``"text"`` is one text. Any other file is one
    text, or is split into several at line ends if it is long. Folders are searched for files with
    ``SUFFIXES``, in the order of their paths.

    Raises:
        InvalidParameterError: a path does not exist or cannot be read, or a line has no text.
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
    """Continuations that the engine samples after the prompts, which are used in turn.

    A document begins with the last tokens of its prompt, as context.

    Args:
        engine: samples the continuations.
        num_tokens: sampled tokens in total; the last continuation is cut off there.
        sampling: of the continuations; the seed increases with every batch.
        prompts: text or token ids.
    """
    left, typical, seed = num_tokens, sampling.max_new_tokens, sampling.seed or 0
    waiting = cycle(prompts)
    while left > 0:
        rows = min(engine.max_batch_size, ceil(left / typical))
        results = engine.generate(list(islice(waiting, rows)), replace(sampling, seed=seed))
        for result in results:
            sampled = result.token_ids[:left]
            left -= len(sampled)
            if sampled:
                yield [*result.prompt_ids[-MAX_ORDER + 1 :], *sampled]
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
