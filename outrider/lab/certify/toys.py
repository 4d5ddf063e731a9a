"""The toy models on which whole rounds are enumerated."""

from collections.abc import Iterator
from dataclasses import dataclass

from outrider.core import Drawn
from outrider.lab.certify.positions import DraftedPositions, coarsened
from outrider.testing import ToyDrafter, ToyModel

OWN = "chain from the target's own distribution"


@dataclass(frozen=True)
class Case:
    """A target and a drafter of two tokens, with the prompt of the round."""

    name: str
    target: ToyModel
    drafter: ToyDrafter
    prompt: tuple[int, ...] = (0, 1)


def cases(drawn: Drawn, positions: DraftedPositions | None) -> Iterator[Case]:
    """Chains and siblings on toy models, and on distributions of the pair where there are any.

    Args:
        drawn: how drafts are obtained.
        positions: distributions of the pair; None if there are none.
    """
    full = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)
    partial = (
        ToyModel.random(3, seed=32, num_impossible=1),
        ToyModel.random(3, seed=33, num_impossible=1),
    )
    models = {"toys": full, "toys with impossible tokens": partial}
    if positions is not None and not positions.chosen:
        models["distributions of the pair"] = tables(positions)
    yield Case(OWN, full[0], ToyDrafter(full[0], 1, drawn))
    for name, (target, draft) in models.items():
        for shape, width in (("chain", 1), ("siblings", 2)):
            yield Case(f"{shape}, {name}", target, ToyDrafter(draft, width, drawn))
    if drawn == "iid":
        yield Case("short chain, toys", full[0], ToyDrafter(full[1], confidence=0.35))
    if "distributions of the pair" in models:
        target, draft = models["distributions of the pair"]
        yield Case(
            "chain, distributions of the pair", target, ToyDrafter(draft, 1, drawn), (2, 2, 1)
        )


def tables(positions: DraftedPositions) -> tuple[ToyModel, ToyModel]:
    """Toys with the pair's distributions, coarsened to 3 classes: one table entry per position."""
    coarse = coarsened(positions, 3)
    return ToyModel(coarse.p_KV.cpu().log()), ToyModel(coarse.q_KV.cpu().log())
