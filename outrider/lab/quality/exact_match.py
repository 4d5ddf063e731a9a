"""Exact match: GSM8K's final numbers, and short answers to questions.

GSM8K (Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021). Two published ways to
find an output's answer:

    strict    the number after ``####``, by the expression of the authors' code, without commas;
              compared as a string. An output that does not end as the training data do has none.
    flexible  the last number of the output, as in lm-evaluation-harness; compared as a number

Short answers are compared after SQuAD's normalisation (Rajpurkar et al., EMNLP 2016): lower case,
no punctuation, no articles, single spaces.
"""

import re
import string
from decimal import Decimal, InvalidOperation

_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def marked_answer(text: str) -> str | None:
    """The number after ``####``, without commas; None if there is none."""
    found = _MARKED.search(text)
    return None if found is None else found.group(1).strip().replace(",", "")


def last_number(text: str) -> Decimal | None:
    """The last number of a text, such as 18 in "costs $18."; None if it has none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def gsm8k_strict(text: str, reference: str) -> bool:
    """Whether an output has the reference's answer after ``####``."""
    expected = marked_answer(reference)
    return expected is not None and marked_answer(text) == expected


def gsm8k_flexible(text: str, reference: str) -> bool:
    """Whether the last number of an output is the reference's answer."""
    expected = last_number(reference)
    return expected is not None and last_number(text) == expected


def normalised(text: str) -> str:
    """A short answer, as it is compared."""
    plain = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(plain.split())


def exact_match(text: str, reference: str) -> bool:
    """Whether an output is the reference, up to case, punctuation, articles and spaces."""
    return normalised(text) == normalised(reference)
