"""Compares the answers of all peers: speed with its spread, agreement, ratios, bars."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peer_workers.protocol import Answer, Ready

OURS = "outrider:speculative compiled"
OURS_EAGER = "outrider:speculative"
OURS_BY_HEAD = "outrider:eagle3 compiled"
REFERENCES = ("outrider:plain", "outrider:plain compiled")


@dataclass
class Series:
    """All answers of one row: a peer in one configuration.

    Attributes:
        name: ``peer:row``.
        ready: the peer's reply after loading.
        warmup_seconds: of the untimed continuations, which may compile.
        passes: for every repeat, an answer for every prompt.
        error: why the row was not measured; "" if it was.
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
    """A ratio of speeds that must be reached.

    Attributes:
        pair: on which it is measured.
        ours: the row in the numerator.
        theirs: the row in the denominator.
        least: the ratio to reach.
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
    Bar("smollm2", OURS_BY_HEAD, "llama.cpp:plain", 1.3),
    Bar("smollm2", OURS_BY_HEAD, "llama.cpp:plain q8_0", 1.3),
    Bar("smollm2", OURS_BY_HEAD, "openvino:plain", 1.3),
    Bar("smollm2", OURS_BY_HEAD, "outrider:plain compiled", 1.4),
)


def acceptance_length(answers: Sequence[Answer]) -> float | None:
    """Tokens per target pass, the prompt's pass included; None if the peer reports no acceptance.

    Every token that is not an accepted draft takes one pass.
    """
    accepted = [answer.accepted for answer in answers]
    if None in accepted:
        return None
    tokens = sum(len(answer.tokens) for answer in answers)
    return tokens / max(tokens - sum(one for one in accepted if one is not None), 1)


def first_difference(text: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first position at which two sequences differ; None if they are equal."""
    if list(text) == list(reference):
        return None
    pairs = zip(text, reference, strict=False)
    short = min(len(text), len(reference))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), short)


def reference(series: Mapping[str, Series]) -> Series | None:
    """The row that other outputs are compared with; None if it was not measured."""
    found = (series[name] for name in REFERENCES if name in series)
    return next((one for one in found if one.passes and not one.error), None)


def summary(series: Series, model: Series | None) -> dict[str, Any]:
    """A row of the report.

    Args:
        series: the row.
        model: the row whose outputs it is compared with; None for no comparison.
    """
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
        differences = [
            first_difference(text, other)
            for text, other in zip(series.texts, model.texts, strict=True)
        ]
        row["texts"] = len(differences)
        row["equal_texts"] = sum(position is None for position in differences)
        row["first_differences"] = [each for each in differences if each is not None]
    row["equal_to_itself"] = all(
        [answer.tokens for answer in answers] == series.texts for answers in series.passes
    )
    return row | asdict(series.ready)


def ours(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Outrider's row in ratios: compiled if it was measured, and with a draft model or a head."""
    measured = (name for name in (OURS, OURS_BY_HEAD) if "median" in rows.get(name, {}))
    return next(measured, OURS_EAGER)


def ratio(rows: Mapping[str, Mapping[str, Any]], one: str, other: str) -> float | None:
    """The ratio of two rows' medians; None if one of the rows is missing."""
    if "median" not in rows.get(one, {}) or "median" not in rows.get(other, {}):
        return None
    return float(rows[one]["median"] / rows[other]["median"])


def verdicts(pair: str, rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars of a pair with the measured ratios; ``met`` is None where none was measured."""
    found = []
    for bar in BARS:
        if bar.pair == pair:
            value = ratio(rows, bar.ours, bar.theirs)
            met = None if value is None else value >= bar.least
            found.append(asdict(bar) | {"ratio": value, "met": met})
    return found
