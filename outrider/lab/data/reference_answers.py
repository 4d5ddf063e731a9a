"""MT-bench's reference answers, which FastChat keeps in files of their own.

    mt_bench/question.jsonl
    mt_bench/reference_answer/gpt-4.jsonl    question_id, choices: [{turns: [an answer per turn]}]
    mt_bench/reference_answer_gpt-4.jsonl    the same, as copies of the benchmark name it

Zheng et al. (MT-bench), NeurIPS 2023, https://arxiv.org/abs/2306.05685.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.errors import InvalidParameterError
from outrider.lab.data.example import Example
from outrider.lab.data.files import read_bytes, records_of
from outrider.lab.data.layouts import Record

FOLDER = "reference_answer"
"""The folder of the files, and the beginning of their names beside the questions."""


@dataclass(frozen=True)
class ReferenceAnswers:
    """The reference answers beside a file of questions.

    Attributes:
        answers: by question, one per turn.
        content: of the files, in their order.
    """

    answers: dict[str, tuple[str, ...]]
    content: bytes

    @classmethod
    def beside(cls, path: Path) -> ReferenceAnswers:
        """The answers for a file; none where there is no file of them. Of several answers to a
        question, the first one by the name of its file is taken.

        Raises:
            InvalidParameterError: a record without a question or answers; the message has the line.
        """
        answers: dict[str, tuple[str, ...]] = {}
        content = b""
        beside = path.parent
        for file in sorted([*beside.glob(f"{FOLDER}/*.jsonl"), *beside.glob(f"{FOLDER}*.jsonl")]):
            if file == path:
                continue
            read = read_bytes(file)
            content += read
            for position, record in records_of(file, read):
                found = _turns(record)
                if found is None:
                    raise InvalidParameterError(
                        f"data file '{file}', {position}: a reference answer needs a question_id "
                        f"and choices: [{{turns: [...]}}], as in MT-bench"
                    )
                answers.setdefault(str(record["question_id"]), found)
        return cls(answers, content)

    def added_to(self, examples: Sequence[Example]) -> tuple[Example, ...]:
        """The examples, with these references where they have none of their own."""
        return tuple(self._with_answers(each) for each in examples)

    def _with_answers(self, example: Example) -> Example:
        found = self.answers.get(example.id, ())
        own = (example.reference, *(turn.reference for turn in example.later))
        padded = (*found, *([""] * (len(own) - len(found))))
        first, *later = (mine or answer or None for mine, answer in zip(own, padded, strict=False))
        turns = zip(example.later, later, strict=True)
        return replace(
            example,
            reference=first,
            later=tuple(replace(turn, reference=answer) for turn, answer in turns),
        )


def _turns(record: Record) -> tuple[str, ...] | None:
    """The answers of a record; None where it has none. Forks of MT-bench write some as numbers."""
    try:
        listed = record["choices"][0]["turns"]
    except (KeyError, IndexError, TypeError):
        return None
    if "question_id" not in record or not isinstance(listed, list):
        return None
    return tuple(map(str, listed))
