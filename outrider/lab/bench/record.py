"""What is measured, as plain numbers that one line of JSON can hold.

RequestRecord   one output: its tokens, and when its rounds ended
BatchRecord     requests that started together, and the seconds until all of them had ended
Repeat          one run of a cell over its data set
CellResult      a cell with all of its repeats, and what follows from them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from outrider.engine import Result, Stats
from outrider.engine.request import Origin, Row
from outrider.lab.bench.cell import Cell
from outrider.lab.data import Example

_LETTERS: dict[Origin, str] = {
    "accepted": "a", "forced": "f", "correction": "c", "bonus": "b", "plain": "p",
}  # fmt: skip
_ORIGINS: dict[str, Origin] = {letter: origin for origin, letter in _LETTERS.items()}


@dataclass(frozen=True)
class RequestRecord:
    """One output.

    Attributes:
        example: index of the example in the data set.
        turn: 0 for the example's prompt, 1 for its first later turn, and so on.
        prompt_tokens: length of the prompt.
        token_ids: the output.
        origins: a letter per token: ``a`` accepted, ``f`` forced by a grammar, ``c`` correction,
            ``b`` bonus, ``p`` plain.
        text: the output as text.
        finish_reason: why it ended.
        round_seconds: when each of its rounds ended, in seconds after the batch started.
        round_tokens: tokens that each round added.
        stats: counts and seconds; the fields of ``Stats``.
    """

    example: int
    turn: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    origins: str
    text: str
    finish_reason: str
    round_seconds: tuple[float, ...]
    round_tokens: tuple[int, ...]
    stats: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """From the start of its batch to its last token."""
        return self.round_seconds[-1]

    def total(self) -> Stats:
        """The counts as an object."""
        return Stats(**self.stats)

    def result(self, example: Example, prompt_ids: Sequence[int]) -> Result:
        """The output as the engine returned it, without log-probabilities."""
        return Result(
            example.prompt,
            tuple(prompt_ids),
            self.text,
            self.token_ids,
            tuple(_ORIGINS[letter] for letter in self.origins),
            (),
            (),
            self.finish_reason,
            self.total(),
        )

    @classmethod
    def of(
        cls,
        example: int,
        turn: int,
        row: Row,
        round_seconds: Sequence[float],
        round_tokens: Sequence[int],
    ) -> RequestRecord:
        """The record of a finished row."""
        result = row.result()
        return cls(
            example,
            turn,
            len(row.request.prompt_ids),
            result.token_ids,
            "".join(_LETTERS[origin] for origin in result.origins),
            result.text,
            result.finish_reason,
            tuple(round_seconds),
            tuple(round_tokens),
            asdict(result.stats),
        )


@dataclass(frozen=True)
class BatchRecord:
    """Requests that started together.

    Attributes:
        seconds: until all of them had ended.
        requests: their outputs.
    """

    seconds: float
    requests: tuple[RequestRecord, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(each.token_ids) for each in self.requests)


@dataclass(frozen=True)
class Repeat:
    """One run of a cell over its data set.

    Attributes:
        key: of the cell.
        number: from 0.
        seed: of the sampling.
        began: date and time in UTC, ISO 8601.
        batches: in the order in which they ran, which is the same for all methods.
        readings: of each meter, by its name.
        session: names the run in which it was measured, between two interruptions.
    """

    key: str
    number: int
    seed: int
    began: str
    batches: tuple[BatchRecord, ...]
    readings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    session: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of all batches."""
        return sum(batch.seconds for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(batch.tokens for batch in self.batches)

    @property
    def tokens_per_second(self) -> float:
        """Over the whole data set, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def requests(self) -> Iterator[RequestRecord]:
        """All outputs."""
        return (request for batch in self.batches for request in batch.requests)

    def as_dict(self) -> dict[str, Any]:
        """The repeat as JSON."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Repeat:
        """The inverse of :meth:`as_dict`."""
        batches = tuple(
            BatchRecord(batch["seconds"], tuple(_request(each) for each in batch["requests"]))
            for batch in values["batches"]
        )
        known = {each.name for each in fields(cls)} - {"batches"}
        return cls(batches=batches, **{name: values[name] for name in known if name in values})


def _request(values: Mapping[str, Any]) -> RequestRecord:
    listed: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in values.items()
    }
    return RequestRecord(**listed)


@dataclass(frozen=True)
class CellResult:
    """A cell with its measurements; one line of ``cells.jsonl``.

    Attributes:
        cell: what was measured.
        data: the data set without its examples: name, source, sha256, number of examples.
        repeats: all runs, in order.
        speed: what follows from the repeats; see ``speed.py``.
        speedup: ratio to the baseline; see ``ratio.py``. None for the baseline itself, and where
            the baseline failed.
        metrics: of each metric, its numbers.
        samples: some outputs of the first repeat, with the text and the origin of each token.
        error: why the cell could not be measured; empty if it was.
        environment: hardware, versions, commit, command and plan.
    """

    cell: Cell
    data: Mapping[str, Any]
    repeats: tuple[Repeat, ...]
    speed: Mapping[str, Any]
    speedup: Mapping[str, Any] | None
    metrics: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    error: str
    environment: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The cell's key."""
        return self.cell.key

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target's distribution."""
        return self.cell.lossless

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "cell": self.cell.as_dict(),
            "data": dict(self.data),
            "speed": dict(self.speed),
            "speedup": None if self.speedup is None else dict(self.speedup),
            "metrics": dict(self.metrics),
            "samples": list(self.samples),
            "error": self.error,
            "environment": dict(self.environment),
            "repeats": [repeat.as_dict() for repeat in self.repeats],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CellResult:
        """The inverse of :meth:`as_dict`."""
        known = {each.name for each in fields(cls)} - {"cell", "repeats"}
        return cls(
            cell=Cell.from_dict(values["cell"]),
            repeats=tuple(Repeat.from_dict(each) for each in values["repeats"]),
            **{name: values[name] for name in known},
        )
