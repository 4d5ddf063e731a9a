"""Compilation before the first request: programs of the models' forward passes and drafts, and of
the verification rules.

Nothing is compiled afterwards: requests never wait for the compiler, and whatever has no program by
then runs eagerly. Programs that other processes compile meanwhile are loaded between rounds
(``background.py``). The drafter's ``capabilities`` say what it needs: chains or trees of the target
and of its own models, fused drafts, and whether programs can verify what it proposes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch

from outrider.core import Capabilities, Verifier
from outrider.engine.engine import Engine
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import Missing, when_missing
from outrider.runtime.executors.fused_draft import DraftPlan
from outrider.runtime.executors.prepare import draft_stages, layer_stages, stages
from outrider.runtime.executors.verification_program import DraftKind

Report = Callable[[str, float | None], None]
"""Called with what is being done and the share that is done, or None where it is not known."""


class Stage(NamedTuple):
    """A program that an engine needs.

    Attributes:
        what: how messages call it.
        make: loads it, or compiles it if it is missing.
        exact: whether it computes the same bits as what runs in its place while it is missing.
        number: tells it from the engine's other programs, in another process, too.
    """

    what: str
    make: Callable[[], None]
    exact: bool
    number: int = 0


def warm_up(engine: Engine, report: Report | None = None, *, shared: bool = False) -> None:
    """Loads or compiles every program that the engine will need. The engine compiles none
    afterwards.

    Args:
        engine: the engine.
        report: called before each program.
        shared: whether other processes compile the same programs now. Those that one of them is
            compiling are then loaded at the end.
    """
    _seal(engine, False)
    todo = programs_of(engine)
    num = len(todo)
    num_done = 0
    for missing in [Missing.COMPILE_UNLOCKED] * shared + [Missing.COMPILE]:
        left = []
        for stage in todo:
            if report is not None:
                report(f"compiling, once: {stage.what}", num_done / num)
            if make(stage, missing):
                num_done += 1
            else:
                left.append(stage)
        todo = left
    _seal(engine, True)


def load_compiled(engine: Engine) -> list[Stage]:
    """Loads the programs that are in the cache folder; returns those that are missing, which the
    engine does without."""
    _seal(engine, True)
    return missing_of(programs_of(engine))


def unloaded(engine: Engine) -> list[Stage]:
    """The programs that the engine needs, none of which it loads or compiles now."""
    _seal(engine, True)
    return programs_of(engine)


def missing_of(programs: Sequence[Stage]) -> list[Stage]:
    """Loads programs that are in the cache folder; returns those that are missing."""
    return [stage for stage in programs if not make(stage, Missing.LEAVE)]


def load_own(engine: Engine) -> None:
    """Loads the programs of the engine's heads and verification rules that are in the cache folder;
    it does without the others, and compiles none afterwards. Models that it shares with other
    engines keep the programs that they have: a request of those may be running."""
    _seal(engine, True)
    able, shared = engine.drafter.capabilities, {id(engine.target), id(engine.draft)}
    for head in able.models:
        if id(head) not in shared:
            for stage in (*_drafts(head, able), *_longer_drafts(head, able)):
                make(stage, Missing.LEAVE)
    for stage in _rules(engine):
        make(stage, Missing.LEAVE)


def refused(engine: Engine) -> list[str]:
    """What runs without a program since it does not compile, or since its program computes
    something else: models with the kind of pass, and rules."""
    models = engine.target, *engine.drafter.capabilities.models
    found = [
        f"{kind} of {model.name}"
        for model in dict.fromkeys(models)
        if model.compiled is not None
        for kind in model.compiled.refused
    ]
    return found + ([] if engine.verification is None else engine.verification.refused)


def make(stage: Stage, missing: Missing) -> bool:
    """Makes a program; returns whether it is there, or known not to compile.

    Args:
        stage: the program.
        missing: what becomes of it if it is not in the cache folder.
    """
    with when_missing(missing) as left:
        stage.make()
    return not left


def programs_of(engine: Engine) -> list[Stage]:
    """The programs that an engine needs, the most important ones first. Drafts of further lengths,
    which can be made by the first one, come last."""
    found = [*_passes(engine), *_rules(engine), *_further_drafts(engine)]
    return [stage._replace(number=number) for number, stage in enumerate(found)]


def layers_of(engine: Engine) -> list[Stage]:
    """The programs of the layers of the engine's models, which run them as long as programs of
    their forward passes are missing. Their numbers follow those of :func:`programs_of`."""
    found = [
        Stage(f"{what} of {model.name}", make, model.exact)
        for model in dict.fromkeys((engine.target, *engine.drafter.capabilities.models))
        for what, make in layer_stages(model)
    ]
    first = len(programs_of(engine))
    return [stage._replace(number=first + number) for number, stage in enumerate(found)]


def _seal(engine: Engine, sealed: bool) -> None:
    for model in (engine.target, *engine.drafter.capabilities.models):
        if model.compiled is not None:
            model.compiled.sealed = sealed
    if engine.verification is not None:
        engine.verification.sealed = sealed


def _passes(engine: Engine) -> Iterator[Stage]:
    able = engine.drafter.capabilities
    yield from _stages(engine.target, able, trees=able.drafts_trees)
    for model in able.models:
        yield from _drafts(model, able)


def _drafts(model: HFModel, able: Capabilities[HFModel]) -> Iterator[Stage]:
    """The programs of a drafter's model, but for those of longer drafts."""
    plan = cast("DraftPlan | None", able.fused_tree)
    yield from _stages(model, able, able.fused_lengths[:1], able.runs_trees, plan)


def _stages(
    model: HFModel,
    able: Capabilities[HFModel],
    drafts: Sequence[int] = (),
    trees: bool = False,
    plan: DraftPlan | None = None,
) -> Iterator[Stage]:
    num_forwards = len(stages(model, trees=trees))
    found = stages(model, drafts, coupled=able.shares_noise, trees=trees, plan=plan)
    for number, (what, make) in enumerate(found):
        exact = number < num_forwards and model.exact  # heads have no pass of their own
        yield Stage(f"{what} of {model.name}", make, exact)


def _further_drafts(engine: Engine) -> Iterator[Stage]:
    able = engine.drafter.capabilities
    for model in able.models:
        yield from _longer_drafts(model, able)


def _longer_drafts(model: HFModel, able: Capabilities[HFModel]) -> Iterator[Stage]:
    for length in able.fused_lengths[1:]:
        for what, make in draft_stages(model, length, coupled=able.shares_noise):
            yield Stage(f"{what} of {model.name}", make, exact=False)


def _rules(engine: Engine) -> Iterator[Stage]:
    verification, target = engine.verification, engine.target
    if verification is None:
        return
    shape = 1, engine.num_speculative_tokens + 1, target.num_tokens
    logits_BNV = torch.zeros(shape, dtype=target.dtype, device=target.device)
    for rule, kind in dict.fromkeys(_verified(engine)):
        if verification.can_compile(rule, kind):
            make = partial(verification.warm_up, rule, kind, logits_BNV)
            what = f"rule {type(rule).__name__}" + " without drafts" * kind.root_only
            yield Stage(what, make, rule.needs == "argmax")


def _verified(engine: Engine) -> Iterator[tuple[Verifier, DraftKind]]:
    """The rules of an engine, with the drafts that they verify."""
    drafter, recipe = engine.drafter, engine.recipe
    able = drafter.capabilities
    if able.drafts and not (able.drafts_trees and able.tree_shape is None):
        searches = drafter.drawn == "searched"  # for which greedy rows have one path
        shape = None if searches else able.tree_shape
        yield recipe.greedy_verifier, DraftKind("chosen", shape, able.keeps_logits)
        drawn = DraftKind(drafter.drawn, able.tree_shape, with_drawn_probs=able.shares_noise)
        yield recipe.verifier, drawn
        if able.drafts_chains:
            yield recipe.greedy_verifier, DraftKind("chosen")
            yield recipe.verifier, DraftKind(drafter.drawn)
    if not able.drafts or engine.governor is not None:
        yield recipe.verifier, DraftKind("chosen", root_only=True)
