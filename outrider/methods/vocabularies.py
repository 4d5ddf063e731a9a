"""Methods for a draft model whose vocabulary differs from the target's."""

from outrider.drafters.vocabulary.slem import SlemDrafter
from outrider.drafters.vocabulary.tli import TliDrafter
from outrider.methods.method import Method, Parts
from outrider.verifiers import Rejection, SampleMatch


def _tli(parts: Parts) -> TliDrafter:
    return TliDrafter(parts.target, parts.draft_model, parts.draft_confidence)


def _slem(parts: Parts) -> SlemDrafter:
    return SlemDrafter(parts.target, parts.draft_model, parts.draft_confidence)


_TIMOR = "Timor et al., ICML 2025"
_DRAFT = "draft model"

VOCABULARIES = (
    Method(
        "tli",
        "A draft model with another vocabulary drafts the tokens that both vocabularies have.",
        _TIMOR,
        _DRAFT,
        Rejection,
        _tli,
        any_vocabulary=True,
    ),
    Method(
        "slem",
        "A draft model with another vocabulary drafts text, kept while the target writes the same.",
        f"{_TIMOR}; assisted generation in transformers",
        _DRAFT,
        SampleMatch,
        _slem,
        any_vocabulary=True,
    ),
)
