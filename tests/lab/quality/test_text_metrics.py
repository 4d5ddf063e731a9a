"""Metrics of text: ROUGE, BLEU, chrF, exact match and distinct-n, by values worked out by hand."""

import builtins
import math
from decimal import Decimal
from typing import Any

import pytest

from outrider.lab.quality.distinct import distinct_n
from outrider.lab.quality.errors import MissingMetricPackageError
from outrider.lab.quality.exact_match import (
    exact_match,
    gsm8k_flexible,
    gsm8k_strict,
    last_number,
    marked_answer,
)
from outrider.lab.quality.rouge import rouge
from outrider.lab.quality.translation import corpus_bleu, corpus_chrf, translation_scores

CAT = "the cat sat on the mat"


def test_rouge_by_hand() -> None:
    """5 of 6 words, 3 of 5 pairs, and a common subsequence of 5 words."""
    pytest.importorskip("rouge_score")
    found = rouge(["the cat lay on the mat", "", CAT], [CAT, CAT, CAT])
    assert found["rouge1"] == pytest.approx([5 / 6, 0, 1])
    assert found["rouge2"] == pytest.approx([3 / 5, 0, 1])
    assert found["rougeL"] == pytest.approx([5 / 6, 0, 1])


def test_rouge_is_the_f_measure_of_stems() -> None:
    """2 of 2 words of the output, 2 of 6 of the reference: 2 · 1 · ⅓ / (1 + ⅓)."""
    pytest.importorskip("rouge_score")
    assert rouge(["cats sat"], [CAT])["rouge1"] == pytest.approx([0.5])


def test_bleu_by_hand() -> None:
    """Precisions 6/7, 5/6, 4/5 and 3/4 and no brevity penalty."""
    pytest.importorskip("sacrebleu")
    expected = 100 * math.prod([6 / 7, 5 / 6, 4 / 5, 3 / 4]) ** 0.25
    assert corpus_bleu([(CAT + " here", CAT)]) == pytest.approx(expected)


def test_bleu_is_of_the_corpus() -> None:
    """Counts are added up before they are divided; the mean of two sentences' BLEU differs."""
    pytest.importorskip("sacrebleu")
    pairs = [(CAT, CAT), ("a dog ran off to the wide open sea", "a dog ran off")]
    matched = (6 + 4, 5 + 3, 4 + 2, 3 + 1)
    total = (6 + 9, 5 + 8, 4 + 7, 3 + 6)
    expected = 100 * math.prod(m / n for m, n in zip(matched, total, strict=True)) ** 0.25
    assert corpus_bleu(pairs) == pytest.approx(expected)


def test_chrf_by_hand() -> None:
    """ "ab" against "abc": precisions 1 and 1, recalls ⅔ and ½, the orders without n-grams in the
    output or the reference left out; F2 of the means 1 and 7/12."""
    pytest.importorskip("sacrebleu")
    precision, recall = 1, (2 / 3 + 1 / 2) / 2
    expected = 100 * 5 * precision * recall / (4 * precision + recall)
    assert corpus_chrf([("ab", "abc")]) == pytest.approx(expected)


def test_scores_of_translations_name_their_signature() -> None:
    pytest.importorskip("sacrebleu")
    found = translation_scores([(CAT, CAT)])
    assert found["bleu"] == pytest.approx(100)
    assert found["chrf"] == pytest.approx(100)
    assert "tok:13a" in found["signatures"]["bleu"]
    assert "nc:6" in found["signatures"]["chrf"]


@pytest.mark.parametrize("package", ["rouge_score", "sacrebleu"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **settings: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingMetricPackageError, match=r"outrider\[quality\]"):
        _ = rouge(["a"], ["a"]) if package == "rouge_score" else corpus_bleu([("a", "a")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She sells 9 eggs.\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("#### -5", "-5"),
        ("The answer is 18", None),
        ("####18", None),
    ],
)
def test_marked_answers(text: str, expected: str | None) -> None:
    assert marked_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It costs $1,234.50.", Decimal("1234.5")),
        ("first 3, then 18.", Decimal(18)),
        ("so x = -7", Decimal(-7)),
        ("#### 18.00", Decimal(18)),
        ("5-7", Decimal(-7)),
        ("none", None),
    ],
)
def test_last_numbers(text: str, expected: Decimal | None) -> None:
    assert last_number(text) == expected


def test_gsm8k() -> None:
    reference = "He has 9 + 9 = 18.\n#### 18"
    assert gsm8k_strict("So\n#### 18", reference)
    assert not gsm8k_strict("The answer is 18.", reference)
    assert gsm8k_flexible("The answer is $18.00.", reference)
    assert not gsm8k_flexible("18 apples and 3 pears", reference)
    assert not gsm8k_flexible("no number", reference)
    assert not gsm8k_strict("#### 18", "no answer")
    assert not gsm8k_flexible("none", "no answer")


def test_short_answers() -> None:
    assert exact_match("The  Eiffel Tower.", "eiffel tower")
    assert not exact_match("the tower", "eiffel tower")
    assert exact_match("theme", "Theme")  # "the" is an article as a word only
    assert not exact_match("me", "theme")


def test_distinct_n_by_hand() -> None:
    """Pairs: (1, 2) twice, (2, 1), (3, 4)."""
    assert distinct_n([[1, 2, 1, 2], [3, 4]], 2) == pytest.approx(3 / 4)
    assert distinct_n([[1, 2, 1, 2], [3, 4]], 1) == pytest.approx(4 / 6)
    assert distinct_n([[1, 2], [1, 2]], 2) == pytest.approx(1 / 2)  # outputs count together
    assert math.isnan(distinct_n([[1], []], 2))
