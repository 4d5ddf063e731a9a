"""Compilation before the first request: graphs of the models, programs of the verification rules.

Nothing is compiled afterwards: requests never wait for the compiler, and whatever has no graph by
then runs eagerly. Drafters say by ``drafts_trees`` that the target scores trees, and by
``runs_trees`` that their own models do; those that have neither work with chains.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from outrider.core import Drafter, Verifier
from outrider.drafters.chain.fused_model import FusedModelDrafter
from outrider.drafters.chain.none import NoDraft
from outrider.drafters.chain.staged import StagedDrafter
from outrider.drafters.sources.sources import MultiSourceDrafter
from outrider.drafters.within_context import unwrapped
from outrider.engine.engine import Engine
from outrider.engine.running_batch import models_of
from outrider.runtime.executors.prepare import stages

Report = Callable[[str, float | None], None]
"""Called with what is being done and the share that is done, or None where it is not known."""

Stage = tuple[str, Callable[[], None]]
"""The name of a graph or program, and a function that makes it if it is missing."""

_NEVER_FULL = NoDraft, MultiSourceDrafter, StagedDrafter
"""Drafters whose drafts are never full chains of γ tokens, the only ones that programs verify."""


def warm_up(engine: Engine, report: Report | None = None) -> None:
    """Makes every missing graph that the engine will need: three minutes of processor time for the
    embedded pair, the first time on a machine. The engine makes no graphs afterwards."""
    _seal(engine, False)
    todo = [*_passes(engine), *_rules(engine)]
    for done, (what, make) in enumerate(todo):
        if report is not None:
            report(f"compiling, once: {what}", done / len(todo))
        make()
    _seal(engine, True)


def _seal(engine: Engine, sealed: bool) -> None:
    for model in (engine.target, *models_of(engine.drafter)):
        if model.compiled is not None:
            model.compiled.sealed = sealed
    if engine.verification is not None:
        engine.verification.sealed = sealed


def _passes(engine: Engine) -> Iterator[Stage]:
    drafter = unwrapped(engine.drafter)
    whole = isinstance(drafter, FusedModelDrafter) and drafter.stop is None
    seen = [(engine.target, 0, getattr(drafter, "drafts_trees", False))]
    for model in models_of(drafter):
        drafts = engine.num_speculative_tokens if whole else 0
        seen.append((model, drafts, getattr(drafter, "runs_trees", False)))
    for model, drafts, trees in seen:
        for what, make in stages(model, drafts, trees=trees):
            yield f"{what} of {model.name}", make


def _rules(engine: Engine) -> Iterator[Stage]:
    verification, target = engine.verification, engine.target
    drafter = unwrapped(engine.drafter)
    if verification is None or not _drafts_full_chains(drafter):
        return
    shape = 1, engine.num_speculative_tokens + 1, target.num_tokens
    logits_BNV = torch.zeros(shape, dtype=target.dtype, device=target.device)
    rules: list[Verifier] = [engine.recipe.greedy_verifier]
    if drafter.drawn == "iid":
        rules.append(engine.recipe.verifier)
    for rule in filter(verification.can_compile, dict.fromkeys(rules)):
        yield f"rule {type(rule).__name__}", partial(verification.warm_up, rule, logits_BNV)


def _drafts_full_chains(drafter: Drafter[Any]) -> bool:
    """Whether a draft may be a full chain of γ tokens, drawn or chosen."""
    if isinstance(drafter, _NEVER_FULL) or getattr(drafter, "drafts_trees", False):
        return False
    return drafter.drawn in ("iid", "chosen") and getattr(drafter, "stop", None) is None
