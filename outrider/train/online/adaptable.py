"""Which engines can be adapted: those with a lossless rule and one draft model of the target's
vocabulary."""

from outrider.core.errors import IncompatibleError
from outrider.core.values import shown
from outrider.engine import Engine
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.weights import check_trainable


def check_adaptable(engine: Engine) -> HFModel:
    """The engine's draft model. Raises IncompatibleError where adaptation does not support the
    method, or runs already."""
    name, draft = engine.method.name, engine.draft
    supported = ", ".join(adaptable_methods())
    if engine.observed.observer is not None:
        raise IncompatibleError("the engine is being adapted already: stop that adaptation first")
    if draft is None or name not in adaptable_methods():
        reason = "has no draft model with the target's vocabulary"
        if engine.method.needs_draft and not engine.verifier.lossless:
            reason = "is lossy, so its outputs would change with the draft model"
        raise IncompatibleError(
            f"method {name!r} {reason}: adaptation supports the methods {supported}"
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
    check_trainable(draft.module, draft.name)
    return draft


def adaptable_methods() -> list[str]:
    """Methods with a lossless rule, and one draft model with the target's vocabulary."""
    return [
        method.name
        for method in METHODS.values()
        if method.needs_draft and method.lossless and not method.any_vocabulary
    ]
