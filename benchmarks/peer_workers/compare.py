"""Compares the answers of all peers: speed with its spread, agreement, ratios, bars.

A bar compares two rows, or groups of rows, of which the fastest counts. Rows in few bits enter a
group only if they change the target's perplexity by at most 1 % (``benchmarks/perplexity.py``).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peer_workers.protocol import BLOCKS, HEAD_KINDS, ROUNDED, Answer, Ready

OURS = "outrider:speculative compiled"
OURS_EAGER = "outrider:speculative"
OURS_DRAFTED = "ours, with a draft or head"
OURS_EQUAL = "ours, with a draft or head, equal perplexity"
OPENVINO_OR_LLAMA_CPP = "OpenVINO or llama.cpp, equal perplexity"
LLAMA_CPP_UNQUANTISED = "llama.cpp:plain, unquantised"
_DRAFTED = ("speculative", "eagle3", "eagle3-hybrid", "eagle3-tree-hybrid", "auto")
_EQUAL_OURS = ("", " q8_0", f" q8_0{ROUNDED}")
_EQUAL_LLAMA_CPP = ("", " f16", " bf16", " q8_0")
_EQUAL_OPENVINO = ("", " int8")
GROUPS: dict[str, tuple[str, ...]] = {
    OURS_DRAFTED: tuple(f"outrider:{method} compiled" for method in _DRAFTED),
    OURS_EQUAL: (
        *(f"outrider:{method}{kind} compiled" for kind in _EQUAL_OURS for method in _DRAFTED),
        *(
            f"outrider:{method} q8_0{ROUNDED} {kind} compiled"
            for kind in HEAD_KINDS
            for method in _DRAFTED
            if method != "speculative"
        ),
    ),
    **{
        f"ours, plain {kind}": tuple(
            f"outrider:plain {kind}{more} compiled" for more in ("", ROUNDED)
        )
        for kind in BLOCKS
    },
    OPENVINO_OR_LLAMA_CPP: (
        *(
            f"openvino:{method}{kind}"
            for kind in _EQUAL_OPENVINO
            for method in ("plain", "speculative", "prompt-lookup")
        ),
        *(
            f"llama.cpp:{method}{kind}"
            for kind in _EQUAL_LLAMA_CPP
            for method in ("plain", "speculative")
        ),
    ),
    LLAMA_CPP_UNQUANTISED: tuple(f"llama.cpp:plain{kind}" for kind in ("", " f16", " bf16")),
}
"""Rows of which the fastest counts, by the name of the group."""

LOSSY_IF_SAMPLED = tuple(
    f"openvino:speculative{kind}" for kind in ("", " f32", " f16", " bf16", " int8")
)
"""Rows whose samples do not follow the target's distribution (docs/peers.md): no bar of a sampled
run counts them."""

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
        ours: the row or the group in the numerator.
        theirs: the row or the group in the denominator.
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
    Bar("smollm2", OURS_DRAFTED, "transformers:assisted", 3.0),
    Bar("smollm2", OURS, "transformers:assisted", 3.0),
    Bar("smollm2", OURS_EQUAL, OPENVINO_OR_LLAMA_CPP, 1.3),
    Bar("smollm2", OURS_DRAFTED, "outrider:plain compiled", 1.4),
    Bar("smollm2", "outrider:plain compiled", LLAMA_CPP_UNQUANTISED, 1.0),
    *(Bar("smollm2", f"ours, plain {kind}", f"llama.cpp:plain {kind}", 1.0) for kind in BLOCKS),
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
    """Outrider's row in ratios: the fastest that drafts in the precision of the run, compiled if
    one was measured."""
    return fastest(rows, OURS_DRAFTED) or OURS_EAGER


def fastest(rows: Mapping[str, Mapping[str, Any]], group: str) -> str | None:
    """The fastest measured row of a group, or the row itself; None if none was measured."""
    measured = [name for name in GROUPS.get(group, (group,)) if "median" in rows.get(name, {})]
    return max(measured, key=lambda name: rows[name]["median"], default=None)


def ratio(rows: Mapping[str, Mapping[str, Any]], one: str, other: str) -> float | None:
    """The ratio of two rows' medians; None if one of the rows is missing."""
    if "median" not in rows.get(one, {}) or "median" not in rows.get(other, {}):
        return None
    return float(rows[one]["median"] / rows[other]["median"])


def verdicts(
    pair: str, rows: Mapping[str, Mapping[str, Any]], temperature: float = 0.0
) -> list[dict[str, Any]]:
    """The bars of a pair with the measured ratios; ``met`` is None where none was measured."""
    found = []
    if temperature:
        rows = {name: row for name, row in rows.items() if name not in LOSSY_IF_SAMPLED}
    for bar in BARS:
        if bar.pair == pair:
            best = [fastest(rows, group) or group for group in (bar.ours, bar.theirs)]
            value = ratio(rows, *best)
            met = None if value is None else value >= bar.least
            found.append(asdict(bar) | {"fastest": best, "ratio": value, "met": met})
    return found
