"""Compilation before the first request: graphs of the models, programs of the verification rules.

Nothing is compiled afterwards: requests never wait for the compiler, and whatever has no graph by
then runs eagerly. The drafter's ``capabilities`` say what it needs: chains or trees of the target
and of its own models, fused drafts, and whether programs can verify what it proposes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch

from outrider.engine.engine import Engine
from outrider.runtime.executors.fused_draft import DraftPlan
from outrider.runtime.executors.fused_verification import DraftKind
from outrider.runtime.executors.prepare import stages

Report = Callable[[str, float | None], None]
"""Called with what is being done and the share that is done, or None where it is not known."""

Stage = tuple[str, Callable[[], None]]
"""The name of a graph or program, and a function that makes it if it is missing."""


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
    for model in (engine.target, *engine.drafter.capabilities.models):
        if model.compiled is not None:
            model.compiled.sealed = sealed
    if engine.verification is not None:
        engine.verification.sealed = sealed


def _passes(engine: Engine) -> Iterator[Stage]:
    able = engine.drafter.capabilities
    for what, make in stages(engine.target, trees=able.drafts_trees):
        yield f"{what} of {engine.target.name}", make
    plan = cast("DraftPlan | None", able.fused_tree)
    for model in able.models:
        for what, make in stages(model, able.fused_tokens, trees=able.runs_trees, plan=plan):
            yield f"{what} of {model.name}", make


def _rules(engine: Engine) -> Iterator[Stage]:
    verification, target, drafter = engine.verification, engine.target, engine.drafter
    able = drafter.capabilities
    if verification is None or not able.drafts or (able.drafts_trees and able.tree_shape is None):
        return
    shape = 1, engine.num_speculative_tokens + 1, target.num_tokens
    logits_BNV = torch.zeros(shape, dtype=target.dtype, device=target.device)
    chosen = DraftKind("chosen", able.tree_shape, able.keeps_logits)
    greedy = engine.recipe.greedy_verifier, chosen
    sampled = engine.recipe.verifier, DraftKind(drafter.drawn, able.tree_shape)
    for rule, kind in dict.fromkeys((greedy, sampled)):
        if verification.can_compile(rule, kind):
            make = partial(verification.warm_up, rule, kind, logits_BNV)
            yield f"rule {type(rule).__name__}", make
