"""Every rule of one place, at the same places: its acceptance, its divergences, the envelope.

Legend: K places, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core import ClosedFormRule, Divergence
from outrider.lab.analysis.frontier import Envelope, Places, verification
from outrider.lab.frontier.envelope import Mentor, chunks
from outrider.lab.frontier.families import FAMILIES, Family
from outrider.verifiers import Mentored


@dataclass(frozen=True)
class Plane:
    """What the rules did.

    Attributes:
        families: in the order of the lines.
        places: for each family, what it did at each value of its parameter.
        envelope: the comparison with the best.
    """

    families: Sequence[Family]
    places: Sequence[Sequence[Places]]
    envelope: Envelope

    def as_dict(self) -> dict[str, Any]:
        """For JSON: means over the places."""
        lines = [
            {
                "name": family.name,
                "parameter": family.parameter,
                "fixed": dict(family.fixed),
                "points": [
                    {"value": value, **places.means()}
                    for value, places in zip(family.grid, line, strict=True)
                ],
            }
            for family, line in zip(self.families, self.places, strict=True)
        ]
        return {"lines": lines, "envelope": self.envelope.as_dict()}


@torch.inference_mode()
def survey(
    p_KV: Tensor,
    q_KV: Tensor,
    families: Sequence[Family] = FAMILIES,
    progress: Callable[[str], None] = lambda stage: None,
) -> Plane:
    """Verifies all rules at all places and holds them against the best."""
    parts: list[list[list[Places]]] = [[[] for _ in family.grid] for family in families]
    envelope = Envelope()
    done = 0
    for p_rows_KV, q_rows_KV in chunks(p_KV, q_KV):
        best = Mentor(p_rows_KV, q_rows_KV)
        for family, line in zip(families, parts, strict=True):
            progress(f"{family.name}, {done} of {len(p_KV)} positions done")
            for (value, rule), point in zip(family.rules(), line, strict=True):
                places = verification(_lent(rule, best), p_rows_KV, q_rows_KV)
                name = f"{family.name} {family.parameter}={value:g}"
                envelope.hold(name, places, best, _optimal_for(rule))
                point.append(places)
        done += len(p_rows_KV)
    joined = [[Places.cat(point) for point in line] for line in parts]
    return Plane(families, joined, envelope)


def _lent(rule: ClosedFormRule, best: Mentor) -> ClosedFormRule:
    return best.lend(rule) if isinstance(rule, Mentored) else rule


def _optimal_for(rule: ClosedFormRule) -> Divergence | None:
    exact = isinstance(rule, Mentored) and rule.bracket == "exact"
    return rule.divergence if exact and isinstance(rule, Mentored) else None
