"""Builds engines from command-line options; errors name the options."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.errors import as_flags, fail, say
from outrider.cli.options.models import EMBEDDED, Models
from outrider.cli.options.speculation import AUTO, Speculation
from outrider.cli.progress import Progress
from outrider.methods.catalogue import entries
from outrider.methods.needs import NEEDS_DRAFT

DEFAULT = "speculative"
"""The method where the user names none and the draft is no head."""


class CompilingTakesLongError(Exception):
    """Programs are still missing after the time that a command gives the compiler."""


if TYPE_CHECKING:
    from outrider.core import Verifier
    from outrider.engine import Engine


def open_engine(
    models: Models,
    speculation: Speculation,
    *,
    verifier: "Verifier | None" = None,
    max_batch_size: int = 1,
    max_memory: str | None = None,
    prefix_cache: str | None = None,
    generation_config: bool = True,
    background: bool = False,
    time_left: bool = False,
    most_seconds: float = math.inf,
) -> "Engine":
    """Loads the models and builds the engine. Options are checked before any model is loaded.

    Args:
        background: compile missing programs while requests run, as commands that run many do.
        time_left: show how long the compiler will take.
        most_seconds: seconds of compiling after which no further program is compiled.

    Raises:
        CompilingTakesLongError: programs were missing after ``most_seconds``. The cache folder
            keeps those that were compiled.
    """
    from outrider.engine import load

    arguments = load_arguments(
        models,
        speculation,
        max_batch_size=max_batch_size,
        max_memory=max_memory,
        prefix_cache=prefix_cache,
        generation_config=generation_config,
    )
    began = None
    with Progress(time_left=time_left) as progress:

        def report(what: str, share: float | None) -> None:
            nonlocal began
            if share is not None:  # the models are loaded
                began = began or time.monotonic()
                if time.monotonic() - began > most_seconds:
                    raise CompilingTakesLongError(what)
            progress.show(what, share)

        return load(**arguments, verifier=verifier, background=background, report=report)


def load_arguments(
    models: Models,
    speculation: Speculation,
    *,
    max_batch_size: int = 1,
    max_memory: str | None = None,
    prefix_cache: str | None = None,
    generation_config: bool = True,
) -> dict[str, Any]:
    """The arguments of :func:`outrider.load`, for this process or for others."""
    from outrider.methods import find_method

    options, draft, method = speculation.options, models.draft, speculation.method
    row = None if method in (None, AUTO) else find_method(method)
    if draft is not None and row is not None and not row.needs_draft and not row.needs_head:
        say(f"note: method '{method}' uses no draft model; --draft {draft} is ignored")
    return {
        "target": models.target,
        "draft": draft,
        "method": method,
        "num_speculative_tokens": speculation.num_speculative_tokens,
        "options": options,
        "draft_confidence": speculation.draft_confidence,
        "draft_length": speculation.draft_length,
        "max_batch_size": max_batch_size,
        "dtype": None if models.dtype == "auto" else models.dtype,
        "device": models.device,
        "trust_remote_code": models.trust_remote_code,
        "quantize_draft": models.quantize_draft,
        "quantize_target": models.quantize_target,
        "kv_dtype": models.kv_dtype,
        "max_memory": max_memory,
        "prefix_cache": prefix_cache,
        "compile": models.compile,
        "exact": models.exact,
        "generation_config": generation_config,
    }


def public_name(target: str) -> str:
    """What clients call a target: the last part of a folder's path, else what the user wrote."""
    folder = Path(target).expanduser()
    return folder.resolve().name if folder.is_dir() else target


def plain_engine(engine: "Engine") -> "Engine":
    """An engine that decodes plainly with the same target, compiled if that one is."""
    from outrider.engine import plain

    with Progress(time_left=True) as progress:
        return plain.plain_engine(engine, progress.show)


def require_draft_of(method: str | None, models: Models) -> None:
    """Fails if the method needs a draft model and none is given. Does not import torch."""
    method = method or DEFAULT
    entry = entries().get(method)
    if entry is not None and entry.needs_draft and _has_no_draft(models):
        raise fail(as_flags(NEEDS_DRAFT.format(method)))


def require_draft(models: Models, command: str) -> None:
    """Fails if no draft model is given to a command that always needs one."""
    if _has_no_draft(models):
        raise fail(
            f"outrider {command} needs a draft model for --target {models.target}: add --draft "
            f"MODEL, a small model with the same tokenizer"
        )


def _has_no_draft(models: Models) -> bool:
    return models.target != EMBEDDED and models.draft is None


def require_template(engine: "Engine", models: Models, remedy: str) -> None:
    """Fails if the target has no chat template.

    Args:
        engine: the engine.
        models: the options that chose the target.
        remedy: what to do with such a model.
    """
    if not getattr(engine.target.tokenizer, "chat_template", None):
        raise fail(
            f"--target {models.target} has no chat template, so it was not trained to chat: take a "
            f"model that was, such as HuggingFaceTB/SmolLM2-135M-Instruct, or {remedy}"
        )


def require_decoder_only(engine: "Engine", command: str) -> None:
    """Fails if the target is an encoder-decoder, which the command does not support."""
    if engine.target.decoder_prompt is not None:
        raise fail(
            f"outrider {command} supports decoder-only models only; {engine.target.name} is an "
            f"encoder-decoder: use outrider generate --compare"
        )
