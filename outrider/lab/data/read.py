"""Reads a data set: from a file, ``builtin:NAME`` or ``hf:NAME:SPLIT:FIELD``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib import resources
from pathlib import Path

from outrider.core.errors import InvalidParameterError
from outrider.lab.data.example import DataSet, Example
from outrider.lab.data.files import read_bytes, records_of
from outrider.lab.data.hub import PREFIX as HUB
from outrider.lab.data.hub import HubSource, hash_of
from outrider.lab.data.layouts import CONVERSATIONS, Layout, Record, RecordError, grouped, layout_of
from outrider.lab.data.reference_answers import ReferenceAnswers

BUILTIN = "builtin:"


def read_data(source: str, name: str = "") -> DataSet:
    """A data set with all of its examples.

    Args:
        source: the path of a ``.jsonl``, ``.csv``, ``.parquet`` or ``.txt`` file, perhaps with
            ``.gz`` after it; ``builtin:NAME``; or ``hf:NAME[@CONFIG]:SPLIT[:FIELD]``.
        name: in tables; by default that of the file.

    Raises:
        InvalidParameterError: the source cannot be read, is empty, or a record lacks a field; the
            message has the line.
    """
    if source.startswith(HUB):
        hub = HubSource.parse(source)
        records = hub.records()
        numbered = ((f"record {number}", record) for number, record in enumerate(records, 1))
        layout, examples = _examples(numbered, f"data {source}")
        return DataSet(name or hub.name, examples, hash_of(records), source, layout)
    path = _builtin(source) if source.startswith(BUILTIN) else Path(source).expanduser()
    content = read_bytes(path)
    layout, examples = _examples(records_of(path, content), f"data file '{path}'")
    if layout == CONVERSATIONS:
        beside = ReferenceAnswers.beside(path)
        examples, content = beside.added_to(examples), content + beside.content
    digest = sha256(content).hexdigest()
    return DataSet(name or _stem(source, path), examples, digest, source, layout)


def builtin_names() -> list[str]:
    """The names of the prompt sets that come with Outrider."""
    folder = resources.files("outrider.lab.data") / "builtin"
    return sorted(each.name.removesuffix(".jsonl") for each in folder.iterdir())


def chosen(data: DataSet, tasks: Sequence[str] = (), limit: int | None = None) -> DataSet:
    """The data set with some of its tasks only, and at most ``limit`` examples of each, spread
    evenly over the file.

    Raises:
        InvalidParameterError: a task that the data set does not have.
    """
    by_task: dict[str, list[int]] = defaultdict(list)
    for number, example in enumerate(data.examples):
        by_task[example.task].append(number)
    for task in tasks:
        if task not in by_task:
            raise InvalidParameterError(
                f"tasks={task!r}: data set {data.name} has no such task; it has "
                f"{', '.join(sorted(filter(None, by_task))) or 'none'}"
            )
    kept = sorted(
        number
        for task, numbers in by_task.items()
        if not tasks or task in tasks
        for number in _spread(numbers, limit)
    )
    return replace(data, examples=tuple(data.examples[number] for number in kept))


def _spread(numbers: Sequence[int], limit: int | None) -> Sequence[int]:
    if limit is None or limit >= len(numbers):
        return numbers
    return [numbers[i * len(numbers) // limit] for i in range(limit)]


def _builtin(source: str) -> Path:
    name = source.removeprefix(BUILTIN)
    if name not in builtin_names():
        raise InvalidParameterError(
            f"data {source!r}: there is no such prompt set; there are "
            f"{', '.join(BUILTIN + each for each in builtin_names())}"
        )
    return Path(str(resources.files("outrider.lab.data") / "builtin" / f"{name}.jsonl"))


def _stem(source: str, path: Path) -> str:
    """The file's name without its suffixes; with its folder's where it says nothing by itself."""
    if source.startswith(BUILTIN):
        return source.removeprefix(BUILTIN)
    stem = path.name.split(".")[0]
    generic = stem in ("question", "test", "train", "val", "validation")
    return path.absolute().parent.name if generic else stem


def _examples(
    numbered: Iterable[tuple[str, Record]], where: str
) -> tuple[str, tuple[Example, ...]]:
    layout: Layout | None = None
    examples: list[Example] = []
    for position, record in numbered:
        try:
            layout = layout or layout_of(record)
            missing = sorted(layout.fields - record.keys())
            if missing:
                raise RecordError(
                    f"no field {missing[0]!r}, which the layout {layout.name} of the first record "
                    f"has: add it, or remove the record"
                )
            example = layout.read(record)
        except RecordError as error:
            raise InvalidParameterError(f"{where}, {position}: {error}") from None
        examples.append(example if example.id else replace(example, id=str(len(examples))))
    if layout is None:
        raise InvalidParameterError(f"{where} has no prompts: it is empty")
    return layout.name, grouped(examples)
