"""Builds an engine from the names of its models and its method, without any program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from outrider import assets
from outrider.core.errors import IncompatibleError, InvalidParameterError, ModelLoadError
from outrider.core.protocols import Verifier
from outrider.core.values import check_flag, shown
from outrider.drafters.chain.draft_length import DraftLength
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.kinds import FORMATS, HeadFormat, format_of
from outrider.engine.engine import Engine
from outrider.engine.governor.sources import MOST
from outrider.engine.settings import AUTO, AUTO_REPEATABLE, Settings
from outrider.engine.warming import Report
from outrider.methods import Method, find_method
from outrider.runtime import HFModel, load_model
from outrider.runtime.executors.compiled import Compile, check_compile
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.hf.quantize import check_kind
from outrider.runtime.hf.source import check_source
from outrider.runtime.kv_cache.storage import KvDtype

EMBEDDED = "embedded"
DEFAULT = "speculative"

Source = str | Path | PreTrainedModel | HFModel
"""The source of a model: a folder, a hub id, or a model in memory."""


def build(
    target: Source,
    draft: Source | Head | None,
    method: str | None,
    num_speculative_tokens: int | Literal["auto", "auto-repeatable", "fixed"] | None,
    *,
    options: Mapping[str, object] | None,
    verifier: Verifier | None,
    measure: bool,
    draft_confidence: float,
    draft_length: str | Sequence[Sequence[int]] | DraftLength | None,
    max_batch_size: int,
    max_memory: int | str | None,
    prefix_cache: int | str | None,
    kv_dtype: KvDtype,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    trust_remote_code: bool,
    quantize_draft: str | None,
    quantize_target: str | None,
    compile: Compile,
    exact: bool,
    generation_config: bool,
    make: Callable[..., Engine],
    report: Report | None = None,
    prepare: Callable[..., None] = prepare,
) -> Engine:
    """The engine of :func:`load`, which has no program yet.

    Args:
        prepare: sets up how each model runs, as :func:`prepare` of ``runtime/executors`` does.
    """
    head, is_automatic = format_of(draft), False
    if isinstance(method, str) and method == AUTO:
        method, options = _automatic(target, draft, head, options)
        is_automatic = True
    row = find_method(_method_for(draft, head) if method is None else method)
    settings: dict[str, Any] = {
        "num_speculative_tokens": num_speculative_tokens,
        "draft_confidence": draft_confidence,
        "draft_length": draft_length,
        "max_batch_size": max_batch_size,
        "max_memory": max_memory,
        "prefix_cache": prefix_cache,
        "kv_dtype": kv_dtype,
        "options": options,
        "verifier": verifier,
        "measure": measure,
        "generation_config": generation_config,
    }
    checked = Settings.checked(row, **settings)  # reports a wrong one before models are loaded
    may_be_governed = verifier is None and (is_automatic or row.outputs_ignore_lengths)
    if num_speculative_tokens is None and may_be_governed and not checked.stops:
        settings["num_speculative_tokens"] = AUTO_REPEATABLE
    kinds = {"target": quantize_target, "draft": quantize_draft}
    for role, kind in kinds.items():
        if kind is not None:
            check_kind(kind, f"quantize_{role}")
    check_compile(compile)
    for name, flag in (("exact", exact), ("trust_remote_code", trust_remote_code)):
        check_flag(name, flag)
    if draft is None and not row.needs_head and isinstance(target, str) and target == EMBEDDED:
        draft = EMBEDDED
    drafts_by_model = draft is not None and bool(row.needs_draft or row.needs_head)
    if quantize_draft is not None and not drafts_by_model:
        raise InvalidParameterError(
            f"quantize_draft={quantize_draft!r}: method {row.name!r} has no draft model or head "
            f"here; leave it out"
        )
    row.require_draft(draft)
    _check_head(row, draft, head)
    names = {"target": _name(target), "draft": _name(draft)}
    target = found(target, "target")
    model_source = None
    if draft is not None and row.needs_draft:
        assert not isinstance(draft, Head)
        model_source = found(draft, "draft")

    def model(source: Source, role: str) -> HFModel:
        if report is not None:
            report(f"loading {role} {names[role]}", None)
        loaded = load_model(
            source,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            role=role,
            quantized=kinds[role],
        )
        prepare(loaded, compile, exact=exact, own=isinstance(source, str | Path))
        return loaded

    loaded_target = model(target, "target")
    loaded_draft: HFModel | Head | None = None
    if model_source is not None:
        loaded_draft = model(model_source, "draft")
    elif row.needs_head:
        loaded_draft = draft if isinstance(draft, Head) else _load_head(draft, head, loaded_target)
        if quantize_draft is not None:
            loaded_draft = loaded_draft.in_few_bits(quantize_draft)
    return make(loaded_target, loaded_draft, row, **settings)


def _method_for(draft: object, head: HeadFormat | None) -> str:
    """The method that a draft runs by where the user names none."""
    if head is not None:
        return head.method
    if isinstance(draft, Head):
        return next(each.method for each in FORMATS if each.kind == draft.kind)
    return DEFAULT


def _automatic(
    target: object,
    draft: object,
    head: HeadFormat | None,
    options: Mapping[str, object] | None,
) -> tuple[str | None, Mapping[str, object] | None]:
    """The method, and its options, that use all sources of drafts at hand."""
    kind = head.kind if head is not None else draft.kind if isinstance(draft, Head) else None
    if kind is not None:
        return "eagle3-hybrid" if kind == "eagle3" else None, options
    if draft is None and not (isinstance(target, str) and target == EMBEDDED):
        return "suffix", options
    return "hybrid", {"model_tokens": MOST} | dict(options or {})


def _check_head(row: Method, draft: object, head: HeadFormat | None) -> None:
    """Raises IncompatibleError where the method and the draft do not fit, before any model is
    loaded."""
    if head is not None and head.kind != row.needs_head and (row.needs_draft or row.needs_head):
        raise IncompatibleError(
            f"method {row.name!r} cannot draft with {draft}, a head of kind {head.kind!r}: leave "
            f"out the method, which is then {head.method!r}"
        )
    if row.needs_head and head is None and not isinstance(draft, Head):
        raise IncompatibleError(
            f"method {row.name!r} drafts with a head of kind {row.needs_head!r}, and "
            f"{shown(draft)} is none: its config.json must be that of such a head"
        )


def _load_head(draft: Any, head: HeadFormat | None, target: HFModel) -> Head:
    assert head is not None
    return head.load(draft, target)


def _name(source: Source | Head | None) -> str:
    return str(source) if isinstance(source, str | Path) else "from memory"


def found(source: Source, role: str) -> Source:
    """Where a model is; raises for a source that is wrong before the model is read."""
    if isinstance(source, str) and source == EMBEDDED:
        try:
            return assets.target_path() if role == "target" else assets.draft_path()
        except FileNotFoundError as error:
            raise ModelLoadError(str(error)) from error
    check_source(source, role)
    return source
