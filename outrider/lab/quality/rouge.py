"""ROUGE-1, ROUGE-2 and ROUGE-L: overlap of n-grams, and the longest common subsequence.

Chin-Yew Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004. Computed by Google's
``rouge-score``, F-measure, with Porter stemming. Its tokenizer keeps the letters a to z and digits
only, so ROUGE of text in other scripts is 0.
"""

from collections.abc import Sequence
from typing import Any

from outrider.lab.quality.errors import MissingMetricPackageError

KINDS = ("rouge1", "rouge2", "rougeL")


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """The F-measure of each output by kind, from 0 to 1.

    Args:
        texts: outputs.
        references: one per output.

    Raises:
        MissingMetricPackageError: rouge-score is not installed.
    """
    scorer = _scorer_class()(list(KINDS), use_stemmer=True)
    scores = [
        scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)
    ]
    return {kind: [float(score[kind].fmeasure) for score in scores] for kind in KINDS}


def require_rouge_score() -> None:
    """Raises MissingMetricPackageError if rouge-score is not installed."""
    _scorer_class()


def _scorer_class() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingMetricPackageError(
            'ROUGE needs rouge-score, which is not installed: pip install "outrider[quality]"'
        ) from error
    return RougeScorer
