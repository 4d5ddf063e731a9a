"""Builds what an engine consists of: its models, its drafter, its fused verification."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.core.capabilities import Capabilities, TreeShape
from outrider.core.errors import InvalidParameterError, OutriderWarning
from outrider.core.protocols import Drafter
from outrider.core.values import shown
from outrider.drafters.heads.head import Head
from outrider.engine.admission import STRETCH, KVMemory
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.sources import ALL, FREE, MOST, Sources, draft_lengths
from outrider.engine.settings import Settings
from outrider.methods import Method, Parts
from outrider.methods.hybrid import num_parameters
from outrider.methods.method import NUM_SPECULATIVE_TOKENS
from outrider.runtime import (
    HFModel,
    RecurrentModel,
    check_chains,
    check_kinds,
    check_vocabularies,
)
from outrider.runtime.executors.compile_cache import compiled_program
from outrider.runtime.executors.cuda_graphs import CudaRecorder, graphed_rule
from outrider.runtime.executors.fused_verification import CompiledVerifier
from outrider.runtime.kv_cache.prefix import PrefixCache


@dataclass(frozen=True)
class Assembly:
    """The parts of an engine, each of which fits the others.

    Attributes:
        target: the model that decides; the drafter's own view of it, where it has one.
        draft: the draft model; None where the method needs none.
        drafter: the source of drafts.
        models: the target, then the models that the drafter runs.
        num_speculative_tokens: γ.
        governor: chooses the length of each draft, up to γ; None where all have γ tokens.
        verification: the compiled verification; None where the target is not compiled.
        memory: the bound of the KV buffers; None without one.
        prefixes: the prefix cache; None without prefix reuse.
    """

    target: HFModel
    draft: HFModel | None
    drafter: Drafter[Any]
    models: tuple[HFModel, ...]
    num_speculative_tokens: int
    governor: Governor | None
    verification: CompiledVerifier | None
    memory: KVMemory | None
    prefixes: PrefixCache | None


def assemble(
    target: HFModel, draft: HFModel | Head | None, method: Method, settings: Settings
) -> Assembly:
    """Builds the parts.

    Raises:
        OutriderError: as :class:`Engine` says.
    """
    method.require_draft(draft)
    head = draft if isinstance(draft, Head) and method.needs_head else None
    draft = draft if isinstance(draft, HFModel) and method.needs_draft else None
    target, draft = _models_in_roles(target, draft, settings)
    if draft is not None:
        check_kinds(target, draft)
        if not method.any_vocabulary:
            check_vocabularies(target, draft)
    drafter = drafter_of(target, draft, settings, head)
    able = drafter.capabilities
    plan = target.plan
    target = able.target or target
    if able.hidden_layers:
        target = target.with_hidden_states(able.hidden_layers)
    target.plan = plan
    models = (target, *able.models)
    check_chains(models, able, method.name)
    num_speculative_tokens = settings.num_speculative_tokens
    if num_speculative_tokens is None:
        num_speculative_tokens = able.depth or (
            MOST if settings.governed else NUM_SPECULATIVE_TOKENS
        )
    prefixes = _prefixes(target, able, method, settings)
    return Assembly(
        target,
        draft,
        drafter,
        models,
        num_speculative_tokens,
        _governor(target, able, settings, num_speculative_tokens),
        _verification(target, able.tree_shape),
        _memory(method, settings, drafter, models, num_speculative_tokens, prefixes),
        prefixes,
    )


def drafter_of(
    target: HFModel, draft: HFModel | None, settings: Settings, head: Head | None = None
) -> Drafter[Any]:
    """The method's drafter for these models, or for a head."""
    parts = Parts(
        target,
        draft,
        settings.draft_confidence,
        settings.num_speculative_tokens,
        settings.draft_length,
        head,
        settings.governed,
    )
    drafter = settings.recipe.build(parts)
    for model in drafter.capabilities.models:
        if model not in (draft, target):  # made of the target by the drafter
            model.plan = target.plan
    return drafter


def check_parts(target: object, draft: object, method: object) -> None:
    """Raises InvalidParameterError unless these are loaded models (or a head as the draft) and a
    method, IncompatibleError for a draft that the method cannot use."""
    for role, model in (("target", target), ("draft", draft)):
        may_lack = role == "draft" and (model is None or isinstance(model, Head))
        if not isinstance(model, HFModel) and not may_lack:
            raise InvalidParameterError(
                f"{role}={shown(model)}: must come from outrider.load_model; outrider.load takes "
                f"folders, hub ids and transformers models"
            )
    if not isinstance(method, Method):
        raise InvalidParameterError(
            f"method={shown(method)}: must be one of outrider.METHODS.values(); outrider.load "
            f"takes names"
        )
    if draft is not None:
        method.check_draft(draft)


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
    if settings.prefix_bytes is not None:  # prefixes are the engine's, the models may be shared
        target = target.in_role(target.name)
        draft = None if draft is None else draft.in_role(draft.name)
    return target, draft


def _verification(target: HFModel, tree_shape: TreeShape | None) -> CompiledVerifier | None:
    if target.compiled is None:
        return None
    if target.device.type == "cuda":
        graphs = partial(graphed_rule, record=CudaRecorder(target.device))
        return CompiledVerifier(graphs, tree_shape, check=lambda *_: "")
    return CompiledVerifier(compiled_program, tree_shape, exact=target.exact)


def _governor(
    target: HFModel, able: Capabilities[HFModel], settings: Settings, num_speculative_tokens: int
) -> Governor | None:
    """The governor that the user asked for; None where nothing is drafted."""
    if not settings.governed or not able.drafts:
        return None
    ratio = sum(map(num_parameters, able.models)) / num_parameters(target)
    names = (ALL, FREE) if able.drafts_freely else (ALL,)
    lags = bool(able.models) and not able.hidden_layers and able.target is None
    fixed = None if settings.governs_seeds else able.depth or NUM_SPECULATIVE_TOKENS
    lengths = draft_lengths(num_speculative_tokens)
    return Governor(Sources(lengths, names, ratio, lags, fixed))


def _memory(
    method: Method,
    settings: Settings,
    drafter: Drafter[Any],
    models: tuple[HFModel, ...],
    num_speculative_tokens: int,
    prefixes: PrefixCache | None,
) -> KVMemory | None:
    if settings.memory_budget is None:
        return None
    if prefixes is not None:
        settings.memory_budget.share(prefixes)
    return KVMemory(
        settings.memory_budget.num_bytes,
        models[0],
        drafter,
        num_speculative_tokens,
        STRETCH if method.any_vocabulary else 1,
        prefixes,
    )


def _prefixes(
    target: HFModel, able: Capabilities[HFModel], method: Method, settings: Settings
) -> PrefixCache | None:
    """A prefix cache for the target, and for the drafter's models where its state is rewindable, so
    that their KV caches follow the context. None, after a warning, where prompts must be read from
    their first token on."""
    if settings.prefix_bytes is None:
        return None
    reason = None
    if target.decoder_prompt is not None:
        reason = f"{target.name} is an encoder-decoder, whose encoder reads the whole prompt"
    if isinstance(target, RecurrentModel):
        reason = f"{target.name} is recurrent, and its state stands for one length of a prompt"
    if able.hidden_layers:
        reason = f"method {method.name!r} reads the target's hidden states of the whole prompt"
    if reason is not None:
        warnings.warn(f"no prefix reuse: {reason}", OutriderWarning, stacklevel=2)
        return None
    prefixes = PrefixCache(settings.prefix_bytes)
    models = [target, *(able.models if able.rewindable else ())]
    for model in dict.fromkeys(models):
        if not isinstance(model, RecurrentModel):
            model.prefixes = prefixes.of_model()
    return prefixes
