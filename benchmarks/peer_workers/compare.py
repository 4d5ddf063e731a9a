"""What the answers of all peers say: speed with its spread, agreement, ratios, bars."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peer_workers.protocol import Answer, Ready

OURS = "outrider:speculative compiled"
OURS_EAGER = "outrider:speculative"
REFERENCES = ("outrider:plain", "outrider:plain compiled")


@dataclass
class Series:
    """One row: a peer in one of its ways.

    Attributes:
        name: ``peer:row``.
        ready: what the peer said when it could generate.
        warmup_seconds: of the unmeasured continuations, where the last things are compiled.
        passes: of every repeat, an answer for every prompt.
        error: why the row is missing; "" where it is not.
    """

    name: str
    ready: Ready | None = None
    warmup_seconds: float = 0.0
    passes: list[list[Answer]] = field(default_factory=list)
    error: str = ""

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of every repeat, over all its prompts."""
        return [
            sum(len(answer.tokens) for answer in answers)
            / sum(answer.seconds for answer in answers)
            for answers in self.passes
        ]

    @property
    def texts(self) -> list[list[int]]:
        """The continuations of the first repeat."""
        return [answer.tokens for answer in self.passes[0]]


@dataclass(frozen=True)
class Bar:
    """A ratio that was promised.

    Attributes:
        pair: that it is measured on.
        ours: the row in the numerator.
        theirs: the row in the denominator.
        least: what the ratio is to reach.
    """

    pair: str
    ours: str
    theirs: str
    least: float


BARS = (
    Bar("embedded", OURS, "transformers:assisted", 4.0),
    Bar("embedded", OURS, "openvino:speculative", 1.0),
    Bar("embedded", OURS, "llama.cpp:speculative", 1.0),
    Bar("1B-cost", OURS, "transformers:assisted", 1.45),
    Bar("1B-cost", OURS, "openvino:speculative", 1.0),
    Bar("1B-cost", OURS, "llama.cpp:speculative", 1.0),
    Bar("1B-cost", OURS, "outrider:plain compiled", 2.0),
)


def acceptance_length(answers: Sequence[Answer]) -> float | None:
    """Tokens per pass of the target, the prompt's pass included, since all but the accepted
    tokens cost a pass; None where the peer does not say what it accepted."""
    accepted = [answer.accepted for answer in answers]
    if None in accepted:
        return None
    tokens = sum(len(answer.tokens) for answer in answers)
    return tokens / max(tokens - sum(one for one in accepted if one is not None), 1)


def first_difference(text: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first position where they part; None if they do not."""
    if list(text) == list(reference):
        return None
    pairs = zip(text, reference, strict=False)
    short = min(len(text), len(reference))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), short)


def reference(series: Mapping[str, Series]) -> Series | None:
    """The row whose texts others are to repeat; None if none of those was measured."""
    found = (series[name] for name in REFERENCES if name in series)
    return next((one for one in found if one.passes and not one.error), None)


def summary(series: Series, model: Series | None) -> dict[str, Any]:
    """A row of the report; ``model`` is the row whose texts it is to repeat."""
    if series.error or series.ready is None or not series.passes:
        return {"error": series.error or "not reached"}
    speeds = series.speeds
    row: dict[str, Any] = {
        "median": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "repeats": speeds,
        "warmup_seconds": series.warmup_seconds,
        "acceptance_length": acceptance_length(series.passes[0]),
    }
    drafted = [answer.drafted for answer in series.passes[0]]
    if None not in drafted:
        row["drafted"] = sum(one for one in drafted if one is not None)
    if model is not None:
        parted = [
            first_difference(text, other)
            for text, other in zip(series.texts, model.texts, strict=True)
        ]
        row["texts"] = len(parted)
        row["equal_texts"] = sum(place is None for place in parted)
        row["first_differences"] = [place for place in parted if place is not None]
    row["equal_to_itself"] = all(
        [answer.tokens for answer in answers] == series.texts for answers in series.passes
    )
    return row | asdict(series.ready)


def ours(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The row of ours that others are held against: compiled if it was measured."""
    return OURS if "median" in rows.get(OURS, {}) else OURS_EAGER


def ratio(rows: Mapping[str, Mapping[str, Any]], one: str, other: str) -> float | None:
    """Of the medians; None if one of the rows is missing."""
    if "median" not in rows.get(one, {}) or "median" not in rows.get(other, {}):
        return None
    return float(rows[one]["median"] / rows[other]["median"])


def verdicts(pair: str, rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars of a pair, with what was measured; ``met`` is None where nothing was."""
    found = []
    for bar in BARS:
        if bar.pair == pair:
            value = ratio(rows, bar.ours, bar.theirs)
            met = None if value is None else value >= bar.least
            found.append(asdict(bar) | {"ratio": value, "met": met})
    return found
