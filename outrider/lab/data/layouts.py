"""The layouts of published data sets, recognised by the fields of their records.

    spec-bench   question_id, category, turns (a list), reference (a list), and no more: Spec-Bench
                 (Xia et al., Findings of ACL 2024), MT-bench and Vicuna-bench (Zheng et al.,
                 NeurIPS 2023)
    speed-bench  question_id, category, sub_category, turns, source: SPEED-Bench (2026)
    humaneval    task_id, prompt, entry_point, canonical_solution, test (Chen et al., 2021)
    gsm8k        question, answer with a last line ``#### NUMBER`` (Cobbe et al., 2021)
    prompts      prompt (a text) or messages (a conversation), and perhaps reference, task and id

A layout turns one record into one example. It raises ``RecordError`` for a record that lacks a
field; the reader adds file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.errors import PromptError
from outrider.core.values import shown
from outrider.engine.chat import Message, check_messages
from outrider.lab.data.example import Example, Turn

Record = Mapping[str, Any]

CONVERSATIONS = "spec-bench"
MT_BENCH = "mt_bench"
"""Spec-Bench's name for the task that MT-bench's eight categories form."""
_MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
_SPEC_BENCH_TASKS = frozenset(("translation", "summarization", "qa", "math_reasoning", "rag"))
_SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


class RecordError(ValueError):
    """A record without the fields of its layout."""


@dataclass(frozen=True)
class Layout:
    """A layout of records.

    Attributes:
        name: in results.
        fields: the fields by which it is recognised.
        read: makes an example of a record.
    """

    name: str
    fields: frozenset[str]
    read: Callable[[Record], Example]


def layout_of(record: Record) -> Layout:
    """The layout whose fields a record has.

    Raises:
        RecordError: none is known; the message lists what would be read.
    """
    for layout in LAYOUTS:
        if layout.fields <= record.keys():
            return layout
    raise RecordError(
        f"fields {', '.join(map(str, record)) or 'none'}: no layout that is known has these; a "
        f"record needs a 'prompt' (text) or 'messages' (a conversation), such as "
        f'{{"prompt": "def f(x):"}}'
    )


def grouped(examples: Iterable[Example]) -> tuple[Example, ...]:
    """The examples, with MT-bench's categories as one task where Spec-Bench's other tasks are
    there, too. ``extra["category"]`` keeps the category."""
    listed = tuple(examples)
    if not _SPEC_BENCH_TASKS & {example.task for example in listed}:
        return listed
    return tuple(
        replace(example, task=MT_BENCH) if example.task in _MT_BENCH_CATEGORIES else example
        for example in listed
    )


# ------------------------------------------------------------------------------------- layouts


def _conversation(record: Record) -> Example:
    """Spec-Bench, MT-bench, SPEED-Bench: the user's messages in order."""
    turns = _texts(record, "turns")
    if not turns:
        raise RecordError("'turns' is empty: it must hold the user's messages")
    if turns[0].startswith(_SPEED_BENCH_PLACEHOLDER):
        raise RecordError(
            "'turns' holds a placeholder, as SPEED-Bench may not contain this prompt: complete the "
            "file with prepare_data.py of NVIDIA's specdec_bench, and give the completed file"
        )
    references = _references(record)
    first, *later = [
        Turn(text, references[number] if number < len(references) else None)
        for number, text in enumerate(turns)
    ]
    return Example(
        _user(first.text),
        first.reference,
        str(record["category"]),
        str(record["question_id"]),
        _rest(record, "turns", "question_id"),
        tuple(later),
    )


def _references(record: Record) -> list[str | None]:
    """The reference of each turn. Where a turn has several, as in Spec-Bench's ``rag``, it is the
    first of them; ``extra["reference"]`` has all."""
    found: list[str | None] = []
    for turn in record.get("reference") or []:
        first = turn[0] if isinstance(turn, list) and turn else turn
        if not isinstance(first, str | None):
            raise RecordError(
                f"'reference' is {shown(record['reference'])}: must be a list of strings"
            )
        found.append(first or None)
    return found


def _humaneval(record: Record) -> Example:
    return Example(
        _text(record, "prompt"),
        _text(record, "canonical_solution"),
        "",
        _text(record, "task_id"),
        _rest(record, "prompt", "canonical_solution", "task_id"),
    )


def _gsm8k(record: Record) -> Example:
    answer = _text(record, "answer")
    _, marker, number = answer.rpartition("####")
    if not marker or not number.strip():
        raise RecordError(
            f"'answer' is {shown(answer)}: its last line must be such as '#### 18', as in GSM8K"
        )
    return Example(
        _user(_text(record, "question")),
        answer,
        "",
        str(record.get("id", "")),
        {"answer": number.strip().replace(",", ""), **_rest(record, "question", "answer", "id")},
    )


def _prompt(record: Record) -> Example:
    return _described(record, _text(record, "prompt"), "prompt")


def _messages(record: Record) -> Example:
    messages = record["messages"]
    try:
        checked = check_messages(messages if isinstance(messages, list) else [])
    except PromptError as error:
        raise RecordError(str(error)) from None
    return _described(record, tuple(checked), "messages")


def _described(record: Record, prompt: str | tuple[Message, ...], field: str) -> Example:
    reference = record.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise RecordError(f"'reference' is {shown(reference)}: must be a string, or left out")
    return Example(
        prompt,
        reference or None,
        str(record.get("task") or ""),
        str(record.get("id", "")),
        _rest(record, field, "reference", "task", "id"),
    )


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _text(record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str) or not value:
        raise RecordError(f"{field!r} is {shown(value)}: must be a string that is not empty")
    return value


def _texts(record: Record, field: str) -> list[str]:
    values = record[field]
    if not isinstance(values, list | tuple) or not all(isinstance(each, str) for each in values):
        raise RecordError(f"{field!r} is {shown(values)}: must be a list of strings")
    return list(values)


def _rest(record: Record, *read: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in read}


LAYOUTS = (
    Layout(
        "speed-bench",
        frozenset(("question_id", "category", "sub_category", "turns", "source")),
        _conversation,
    ),
    Layout(CONVERSATIONS, frozenset(("question_id", "category", "turns")), _conversation),
    Layout(
        "humaneval",
        frozenset(("task_id", "prompt", "entry_point", "canonical_solution", "test")),
        _humaneval,
    ),
    Layout("gsm8k", frozenset(("question", "answer")), _gsm8k),
    Layout("prompts", frozenset(("messages",)), _messages),
    Layout("prompts", frozenset(("prompt",)), _prompt),
)
