"""Builds what an engine consists of: its models, its drafter, its fused verification."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.core.protocols import Drafter
from outrider.core.values import shown
from outrider.engine.admission import STRETCH, KVMemory
from outrider.engine.settings import Settings
from outrider.methods import Method, Parts
from outrider.methods.method import NUM_SPECULATIVE_TOKENS
from outrider.runtime import HFModel, check_kinds, check_vocabularies
from outrider.runtime.executors.compile_cache import compiled_program
from outrider.runtime.executors.fused_verification import CompiledVerifier


@dataclass(frozen=True)
class Assembly:
    """The parts of an engine, each of which fits the others.

    Attributes:
        target: the model that decides; the drafter's own view of it, where it has one.
        draft: the draft model; None where the method needs none.
        drafter: the source of drafts.
        models: the target, then the models that the drafter runs.
        num_speculative_tokens: γ.
        verification: the compiled verification; None where the target is not compiled.
        memory: the bound of the KV buffers; None without one.
    """

    target: HFModel
    draft: HFModel | None
    drafter: Drafter[Any]
    models: tuple[HFModel, ...]
    num_speculative_tokens: int
    verification: CompiledVerifier | None
    memory: KVMemory | None


def assemble(
    target: HFModel, draft: HFModel | None, method: Method, settings: Settings
) -> Assembly:
    """Builds the parts.

    Raises:
        OutriderError: as :class:`Engine` says.
    """
    method.require_draft(draft)
    target, draft = _models_in_roles(target, draft if method.needs_draft else None, settings)
    if draft is not None:
        check_kinds(target, draft)
        if not method.any_vocabulary:
            check_vocabularies(target, draft)
    drafter = drafter_of(target, draft, settings)
    able = drafter.capabilities
    own_target, plan = target, target.plan
    target = able.target or target
    if able.hidden_layers:
        target = target.with_hidden_states(able.hidden_layers)
    models = (target, *able.models)
    for model in models:
        if model not in (draft, own_target):  # made of the target by the drafter
            model.plan = plan
    num_speculative_tokens = settings.num_speculative_tokens
    if num_speculative_tokens is None:
        num_speculative_tokens = able.depth or NUM_SPECULATIVE_TOKENS
    return Assembly(
        target,
        draft,
        drafter,
        models,
        num_speculative_tokens,
        _verification(target, num_speculative_tokens),
        _memory(method, settings, drafter, models, num_speculative_tokens),
    )


def drafter_of(target: HFModel, draft: HFModel | None, settings: Settings) -> Drafter[Any]:
    """The method's drafter for these models."""
    parts = Parts(
        target,
        draft,
        settings.draft_confidence,
        settings.num_speculative_tokens,
        settings.draft_length,
    )
    return settings.recipe.build(parts)


def check_parts(target: object, draft: object, method: object) -> None:
    """Raises InvalidParameterError unless these are loaded models and a method."""
    for role, model in (("target", target), ("draft", draft)):
        if not isinstance(model, HFModel) and not (role == "draft" and model is None):
            raise InvalidParameterError(
                f"{role}={shown(model)}: must come from outrider.load_model; outrider.load takes "
                f"folders, hub ids and transformers models"
            )
    if not isinstance(method, Method):
        raise InvalidParameterError(
            f"method={shown(method)}: must be one of outrider.METHODS.values(); outrider.load "
            f"takes names"
        )


def _models_in_roles(
    target: HFModel, draft: HFModel | None, settings: Settings
) -> tuple[HFModel, HFModel | None]:
    """Target and draft model with the engine's KV buffers. A model in both roles becomes two, each
    with a clock and a health check of its own."""
    target = target.with_kv_dtype(settings.kv_dtype, settings.memory_budget)
    if draft is not None:
        draft = draft.with_kv_dtype(settings.kv_dtype, settings.memory_budget)
    if draft is target:
        draft = target.in_role(f"draft {target.name}")
    return target, draft


def _verification(target: HFModel, num_speculative_tokens: int) -> CompiledVerifier | None:
    if target.compiled is None:
        return None
    make = partial(compiled_program, device=target.device)
    return CompiledVerifier(make, num_speculative_tokens, exact=target.exact)


def _memory(
    method: Method,
    settings: Settings,
    drafter: Drafter[Any],
    models: tuple[HFModel, ...],
    num_speculative_tokens: int,
) -> KVMemory | None:
    if settings.memory_budget is None:
        return None
    return KVMemory(
        settings.memory_budget.num_bytes,
        models[0],
        drafter,
        num_speculative_tokens,
        STRETCH if method.any_vocabulary else 1,
    )
