"""Methods that draft from an n-gram table."""

from outrider.core.errors import InvalidParameterError
from outrider.drafters.ngram.drafter import How, NgramDrafter, check_vocabulary
from outrider.drafters.ngram.table import NgramTable
from outrider.methods.method import Method, Parts
from outrider.verifiers import Rejection


def _ngram(parts: Parts, *, file: str = "", order: int = 0, draw: How = "sample") -> NgramDrafter:
    """Order 0 stands for the file's own."""
    if not file:
        raise InvalidParameterError(
            "method 'ngram' drafts from a file, and option 'file' names none: build one with "
            "`outrider ngram build --out FILE --text PATH`, then set file=FILE"
        )
    table = NgramTable.open(file, order or None)
    check_vocabulary(table, file, parts.target)
    return NgramDrafter(
        table, parts.target.num_tokens, draw, parts.draft_confidence, dtype=parts.target.dtype
    )


NGRAMS = (
    Method(
        "ngram",
        "Drafts from an n-gram model of a corpus, a file that `outrider ngram build` writes.",
        "Leviathan et al., ICML 2023; Spector and Ré, 2023",
        "n-gram file",
        Rejection,
        _ngram,
    ),
)
