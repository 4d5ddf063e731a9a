"""Engines from options, with errors that name options."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from outrider.cli.errors import fail, say
from outrider.cli.progress import Progress

if TYPE_CHECKING:
    from outrider.core import Verifier
    from outrider.engine import Engine
    from outrider.models.compiled import Compile
    from outrider.models.slabs import KvDtype

EMBEDDED = "embedded"


def open_engine(
    target: str,
    draft: str | None,
    method: str,
    num_speculative_tokens: int | None,
    *,
    method_options: Mapping[str, object] | None = None,
    verifier: "Verifier | None" = None,
    draft_confidence: float = 0.0,
    draft_length: str = "fixed",
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    quantize_draft: str | None = None,
    quantize_target: str | None = None,
    kv_dtype: str = "auto",
    max_memory: str | None = None,
    compile: str = "off",
    exact: bool = False,
) -> "Engine":
    """Loads the models and builds the engine; what can be checked before loading, is."""
    from outrider.engine import load
    from outrider.methods import find_method

    needs_draft = find_method(method).needs_draft
    if needs_draft and draft is None and target != EMBEDDED:
        raise fail(
            f"method '{method}' needs a draft model beside --target {target}: add --draft MODEL "
            f"with the same tokenizer, or take --method plain"
        )
    if not needs_draft and draft is not None:
        say(f"note: method '{method}' uses no draft model; --draft {draft} is left aside")
    with Progress(quiet=compile == "off") as progress:
        return load(
            target,
            draft,
            method,
            num_speculative_tokens,
            options=method_options,
            verifier=verifier,
            draft_confidence=draft_confidence,
            draft_length=draft_length,
            max_batch_size=1,
            dtype=None if dtype == "auto" else dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            quantize_draft=quantize_draft,
            quantize_target=quantize_target,
            kv_dtype=cast("KvDtype", kv_dtype),
            max_memory=max_memory,
            compile=cast("Compile", compile),
            exact=exact,
            report=progress.show,
        )


def plain_engine(engine: "Engine") -> "Engine":
    """Plain decoding with the same target."""
    from outrider.engine import Engine
    from outrider.methods import METHODS

    return Engine(engine.target, None, METHODS["plain"], max_batch_size=1)


def require_decoder_only(engine: "Engine", command: str) -> None:
    """Fails for an encoder-decoder, whose prompts are sources, where a command knows none."""
    if engine.target.opening is not None:
        raise fail(
            f"outrider {command} takes decoder-only models; {engine.target.name} is an "
            f"encoder-decoder: see outrider generate --compare"
        )
