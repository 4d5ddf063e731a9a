"""Which engines can be adapted: those with a lossless rule, and one draft model of the target's
vocabulary or an EAGLE-3 head."""

from outrider.core.errors import IncompatibleError
from outrider.core.values import shown
from outrider.engine import Engine
from outrider.methods import METHODS
from outrider.runtime.weights import check_trainable
from outrider.train.online.draft_model import DraftModelSubject
from outrider.train.online.eagle3_head import HeadSubject, model_of
from outrider.train.online.subject import Subject

HEADS = ("eagle3",)
"""Kinds of heads that are adapted."""


def subject_of(engine: Engine) -> Subject:
    """What is adapted of an engine. Raises IncompatibleError where adaptation does not support the
    method, or runs already."""
    name, draft, head = engine.method.name, engine.draft, model_of(engine)
    supported = ", ".join(adaptable_methods())
    if engine.observed.observer is not None:
        raise IncompatibleError("the engine is being adapted already: stop that adaptation first")
    if (draft is None and head is None) or name not in adaptable_methods():
        raise IncompatibleError(
            f"method {name!r} {_reason(engine)}: adaptation supports the methods {supported}"
        )
    if not engine.verifier.lossless:
        raise IncompatibleError(
            f"verifier {shown(engine.verifier)} is lossy, so outputs would change with the draft "
            f"model: adapt an engine with a lossless rule"
        )
    if engine.target.decoder_prompt is not None:
        raise IncompatibleError(
            f"{engine.target.name} is an encoder-decoder, whose drafts are not adapted: adaptation "
            f"supports decoder-only pairs"
        )
    if head is not None:
        check_trainable(head.network, head.name)
        return HeadSubject(engine, head)
    assert draft is not None
    check_trainable(draft.module, draft.name)
    return DraftModelSubject(engine, draft)


def adaptable_methods() -> list[str]:
    """Methods with a lossless rule, and one draft model with the target's vocabulary or a head of
    a kind that is adapted."""
    return [
        method.name
        for method in METHODS.values()
        if method.lossless
        and not method.any_vocabulary
        and (method.needs_draft or method.needs_head in HEADS)
    ]


def _reason(engine: Engine) -> str:
    """Why a method is not supported."""
    method = engine.method
    if (method.needs_draft or method.needs_head) and not engine.verifier.lossless:
        return "is lossy, so its outputs would change with the draft model"
    if method.needs_head:
        return f"has a head of kind {method.needs_head!r}, which is not adapted"
    return "has no draft model with the target's vocabulary"
