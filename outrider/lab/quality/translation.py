"""BLEU and chrF of translations, by ``sacrebleu``, whose signatures make scores comparable.

Papineni et al., BLEU, ACL 2002; Popović, chrF, WMT 2015; Post, A Call for Clarity in Reporting BLEU
Scores, WMT 2018. Both are metrics of a corpus, from 0 to 100: their means over sentences are
something else, so intervals need :func:`corpus_bleu` and :func:`corpus_chrf` as the statistic of a
bootstrap.
"""

from collections.abc import Sequence
from typing import Any

from outrider.lab.quality.errors import MissingMetricPackageError

Pair = tuple[str, str]
"""An output and its reference."""


def corpus_bleu(pairs: Sequence[Pair]) -> float:
    """BLEU of a corpus: 4-grams, the tokenizer 13a, exponential smoothing."""
    return _corpus("BLEU", pairs)[0]


def corpus_chrf(pairs: Sequence[Pair]) -> float:
    """chrF2 of a corpus: character 6-grams, no word n-grams."""
    return _corpus("CHRF", pairs)[0]


def translation_scores(pairs: Sequence[Pair]) -> dict[str, Any]:
    """BLEU and chrF of a corpus, and sacrebleu's signatures of both.

    Raises:
        MissingMetricPackageError: sacrebleu is not installed.
    """
    bleu, bleu_signature = _corpus("BLEU", pairs)
    chrf, chrf_signature = _corpus("CHRF", pairs)
    return {
        "bleu": bleu,
        "chrf": chrf,
        "signatures": {"bleu": bleu_signature, "chrf": chrf_signature},
    }


def sentence_scores(pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """BLEU and chrF of each sentence alone, for comparisons over prompts. BLEU leaves out the
    orders for which a sentence is too short."""
    metrics = _metrics()
    bleu, chrf = metrics.BLEU(effective_order=True), metrics.CHRF()
    return {
        "sentence_bleu": [float(bleu.sentence_score(a, [b]).score) for a, b in pairs],
        "sentence_chrf": [float(chrf.sentence_score(a, [b]).score) for a, b in pairs],
    }


def require_sacrebleu() -> None:
    """Raises MissingMetricPackageError if sacrebleu is not installed."""
    _metrics()


def _corpus(kind: str, pairs: Sequence[Pair]) -> tuple[float, str]:
    metric: Any = getattr(_metrics(), kind)()
    texts, references = [text for text, _ in pairs], [reference for _, reference in pairs]
    score = float(metric.corpus_score(texts, [references]).score)
    return score, str(metric.get_signature())


def _metrics() -> Any:
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise MissingMetricPackageError(
            'BLEU and chrF need sacrebleu, which is not installed: pip install "outrider[quality]"'
        ) from error
    return metrics
