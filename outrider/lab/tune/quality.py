"""Whether a lossy source's outputs are good enough: a metric against references, relative to the
target's own outputs.

    ratio = mean score of the source's outputs / mean score of plain decoding's,  same prompts

A source holds if the ratio is at least what the user demands. As with successive halving, little is
spent on what is clear: 4 prompts first, then twice as many, until the bootstrap interval of
score - demanded · target's score leaves out 0. The confidence of 95 % is shared out among these
looks (Bonferroni). To each look two made-up prompts are added, one on which the source scores
nothing and one on which it scores as well as possible: a few prompts that happen to agree would
otherwise have an interval of width 0. Where the prompts end first, the ratio itself decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.core.values import is_finite, shown
from outrider.lab.data import DataSet
from outrider.lab.data.files import read_bytes, records_of
from outrider.lab.quality.bootstrap import paired_bootstrap
from outrider.lab.quality.exact_match import exact_match
from outrider.lab.quality.rouge import require_rouge_score, rouge
from outrider.lab.quality.translation import require_sacrebleu, sentence_scores

AT_LEAST = 0.95
_FIRST = 4  # prompts of the first look
_CONFIDENCE = 0.95

Texts = Callable[[Sequence[int]], Sequence[str]]
"""The outputs for some prompts, by their indices."""

Scores = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""The score of each output, given its reference."""


def _exact_match(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    return [float(exact_match(*pair)) for pair in zip(texts, references, strict=True)]


def _rouge_l(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    return rouge(texts, references)["rougeL"]


def _bleu(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    return sentence_scores(list(zip(texts, references, strict=True)))["sentence_bleu"]


METRICS: dict[str, tuple[Scores, Callable[[], None]]] = {
    "exact_match": (_exact_match, lambda: None),
    "rouge_l": (_rouge_l, require_rouge_score),
    "bleu": (_bleu, require_sacrebleu),
}
"""The scores, and functions that raise where a package is missing."""


@dataclass(frozen=True)
class QualityFloor:
    """What the user demands of a lossy source.

    Attributes:
        metric: one of ``METRICS``.
        at_least: share of the target's own score, above 0 and at most 1.
        references: a file with a reference for each prompt; None takes those of the data set.

    Raises:
        InvalidParameterError: an unknown metric, or a share out of range.
        MissingMetricPackageError: the metric needs a package that is not installed.
    """

    metric: str
    at_least: float = AT_LEAST
    references: Path | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise InvalidParameterError(
                f"metric={shown(self.metric)}: must be {', '.join(list(METRICS)[:-1])} or "
                f"{list(METRICS)[-1]}"
            )
        if not is_finite(self.at_least) or not 0 < self.at_least <= 1:
            raise InvalidParameterError(
                f"at_least={shown(self.at_least)}: must be above 0 and at most 1, a share of the "
                f"target's own score"
            )
        METRICS[self.metric][1]()

    def scores(self, texts: Sequence[str], references: Sequence[str]) -> Sequence[float]:
        """The score of each output."""
        return METRICS[self.metric][0](texts, references)


@dataclass(frozen=True)
class Quality:
    """How good a source's outputs are.

    Attributes:
        metric: as of the floor.
        demanded: share of the target's score.
        ratio: of the scores.
        score, target_score: means over the prompts.
        num_prompts: compared.
        is_decided: whether the interval leaves out the demanded ratio; if not, ``ratio`` decided.
        holds: whether the source is good enough.
    """

    metric: str
    demanded: float
    ratio: float
    score: float
    target_score: float
    num_prompts: int
    is_decided: bool
    holds: bool

    def __str__(self) -> str:
        sure = "" if self.is_decided else ", which is not certain"
        return (
            f"{self.metric} {self.score:.3g}, {self.ratio:.3f} of the target's "
            f"{self.target_score:.3g} over {self.num_prompts} prompts{sure}"
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return asdict(self)


def assess(
    floor: QualityFloor,
    references: Sequence[str],
    of_target: Texts,
    of_source: Texts,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Quality:
    """Compares a source's outputs with the target's own.

    Args:
        floor: what is demanded.
        references: of all prompts.
        of_target: plain decoding's outputs for some prompts.
        of_source: the source's outputs for the same prompts.
        may_go_on: whether there is time for another look.

    Raises:
        InvalidParameterError: the target's own score is 0, so that there is nothing to compare
            with.
    """
    looks = _looks(len(references))
    confidence = 1 - (1 - _CONFIDENCE) / len(looks)
    mine: list[float] = []
    theirs: list[float] = []
    is_decided, holds = False, False
    for end in looks:
        indices = range(len(mine), end)
        expected = [references[index] for index in indices]
        mine += floor.scores(of_source(indices), expected)
        theirs += floor.scores(of_target(indices), expected)
        wanted = [floor.at_least * each for each in theirs]
        top = max(mine + theirs)
        extremes = [0.0, top], [floor.at_least * top] * 2
        found = paired_bootstrap(mine + extremes[0], wanted + extremes[1], confidence=confidence)
        holds, is_decided = sum(mine) >= sum(wanted), found.is_significant
        if is_decided or not may_go_on():
            break
    score, target_score = statistics.fmean(mine), statistics.fmean(theirs)
    if not target_score:
        raise InvalidParameterError(
            f"metric={floor.metric!r}: the target's own outputs score 0 on {len(mine)} prompts, so "
            f"that no share of that can be demanded: choose another metric, or other references"
        )
    ratio = score / target_score
    return Quality(
        floor.metric, floor.at_least, ratio, score, target_score, len(mine), is_decided, holds
    )


def with_references(data: DataSet, file: Path) -> DataSet:
    """The data set with the references of a file: one per line of a text, or the field
    ``reference`` of each record of JSON lines, CSV or Parquet.

    Raises:
        InvalidParameterError: the file cannot be read, has another number of references, or a
            record has none.
    """
    found = []
    for position, record in records_of(file, read_bytes(file)):
        value = record.get("reference", record.get("prompt"))
        if not isinstance(value, str):
            raise InvalidParameterError(
                f"references={str(file)!r}: {position} has no text in the field 'reference'"
            )
        found.append(value)
    if len(found) != len(data):
        raise InvalidParameterError(
            f"references={str(file)!r}: it has {len(found)}, and data set {data.name} has "
            f"{len(data)} prompts: give one reference for each, in the same order"
        )
    pairs = zip(data, found, strict=True)
    return replace(data, examples=tuple(replace(each, reference=text) for each, text in pairs))


def _looks(num_prompts: int) -> list[int]:
    """Numbers of prompts after which the comparison may end."""
    steps = max(0, math.ceil(math.log2(num_prompts / _FIRST)))
    return [*(_FIRST << step for step in range(steps)), num_prompts]
