"""The small models on which whole rounds are run.

Legend: E entries of a table, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from outrider.core import Drawn
from outrider.lab.certify.positions import Places, coarsened
from outrider.testing import ToyDrafter, ToyModel

OWN = "chain from the target's own distribution"


@dataclass(frozen=True)
class Case:
    """A round of two drafted tokens."""

    name: str
    target: ToyModel
    drafter: ToyDrafter
    prompt: tuple[int, ...] = (0, 1)


def cases(drawn: Drawn, places: Places | None) -> Iterator[Case]:
    full = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)
    partial = (
        ToyModel.random(3, seed=32, num_impossible=1),
        ToyModel.random(3, seed=33, num_impossible=1),
    )
    models = {"toys": full, "toys with impossible tokens": partial}
    if places is not None and not places.chosen:
        models["distributions of the pair"] = tables(places)
    yield Case(OWN, full[0], ToyDrafter(full[0], 1, drawn))
    for name, (target, guess) in models.items():
        for shape, width in (("chain", 1), ("siblings", 2)):
            yield Case(f"{shape}, {name}", target, ToyDrafter(guess, width, drawn))
    if drawn == "iid":
        yield Case("short chain, toys", full[0], ToyDrafter(full[1], confidence=0.35))
    if "distributions of the pair" in models:
        target, guess = models["distributions of the pair"]
        yield Case(
            "chain, distributions of the pair", target, ToyDrafter(guess, 1, drawn), (2, 2, 1)
        )


def tables(places: Places) -> tuple[ToyModel, ToyModel]:
    """Two models whose distributions are the pair's, coarsened to 3 classes: entry e is place e."""
    coarse = coarsened(places, 3)
    return ToyModel(coarse.p_KV.cpu().log()), ToyModel(coarse.q_KV.cpu().log())
