"""What is compiled before the first request: the graphs of the models, and the rule's programs."""

from collections.abc import Callable
from functools import partial

import torch

from outrider.drafters.whole import WholeDrafter
from outrider.drafters.within import unwrapped
from outrider.engine.generate import Engine
from outrider.engine.slots import models_of
from outrider.models.runtime import stages

Report = Callable[[str, float | None], None]
"""Is told what is being done, and what share of it all is done, or None where nobody knows."""


def warm_up(engine: Engine, report: Report | None = None) -> None:
    """Makes every graph that the engine will need and has not; the first time on a machine it takes
    some minutes."""
    drafter = unwrapped(engine.drafter)
    whole = drafter if isinstance(drafter, WholeDrafter) else None
    todo = [
        (f"{what} of {model.name}", make)
        for model in (engine.target, *models_of(engine.drafter))
        for what, make in stages(model, whole.num_whole if whole and model is engine.draft else 0)
    ]
    judge, target = engine.judge, engine.target
    if judge is not None and whole is not None:
        shape = 1, engine.num_speculative_tokens + 1, target.num_tokens
        logits_BNV = torch.zeros(shape, dtype=target.dtype, device=target.device)
        for rule in dict.fromkeys([engine.recipe.verifier, engine.recipe.greedy_verifier]):
            todo.append((f"rule {type(rule).__name__}", partial(judge.warm_up, rule, logits_BNV)))
    for done, (what, make) in enumerate(todo):
        if report is not None:
            report(f"compiling, once: {what}", done / len(todo))
        make()
