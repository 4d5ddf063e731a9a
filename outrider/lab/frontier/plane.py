"""Node-local rules at the same positions: acceptance, divergences, and the envelope of the best.

Legend: K positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core import ClosedFormRule, Divergence
from outrider.lab.analysis.frontier import Envelope, RuleOutcome, rule_outcome
from outrider.lab.frontier.envelope import MentoredEnvelope, chunks
from outrider.lab.frontier.families import FAMILIES, Family
from outrider.verifiers import Mentored


@dataclass(frozen=True)
class Plane:
    """All rules in the plane of acceptance and divergence.

    Attributes:
        families: the rules; each is a line of the plane.
        outcomes: for each family, its outcome at each value of its parameter.
        envelope: the comparison with the best rule.
    """

    families: Sequence[Family]
    outcomes: Sequence[Sequence[RuleOutcome]]
    envelope: Envelope

    def as_dict(self) -> dict[str, Any]:
        """The means over the positions as a JSON document."""
        lines = [
            {
                "name": family.name,
                "parameter": family.parameter,
                "fixed": dict(family.fixed),
                "points": [
                    {"value": value, **outcome.means()}
                    for value, outcome in zip(family.grid, line, strict=True)
                ],
            }
            for family, line in zip(self.families, self.outcomes, strict=True)
        ]
        return {"lines": lines, "envelope": self.envelope.as_dict()}


@torch.inference_mode()
def compare_rules(
    p_KV: Tensor,
    q_KV: Tensor,
    families: Sequence[Family] = FAMILIES,
    progress: Callable[[str], None] = lambda stage: None,
) -> Plane:
    """Computes every rule's outcome at all positions and compares it with the best rule.

    Args:
        p_KV: the target's distributions.
        q_KV: the draft's distributions.
        families: the rules.
        progress: called with a description of each stage before it starts.
    """
    parts: list[list[list[RuleOutcome]]] = [[[] for _ in family.grid] for family in families]
    envelope = Envelope()
    done = 0
    for p_rows_KV, q_rows_KV in chunks(p_KV, q_KV):
        best = MentoredEnvelope(p_rows_KV, q_rows_KV)
        for family, line in zip(families, parts, strict=True):
            progress(f"{family.name}, {done} of {len(p_KV)} positions done")
            for (value, rule), point in zip(family.rules(), line, strict=True):
                outcome = rule_outcome(_with_cached_paths(rule, best), p_rows_KV, q_rows_KV)
                name = f"{family.name} {family.parameter}={value:g}"
                envelope.compare(name, outcome, best, _optimal_for(rule))
                point.append(outcome)
        done += len(p_rows_KV)
    joined = [[RuleOutcome.cat(point) for point in line] for line in parts]
    return Plane(families, joined, envelope)


def _with_cached_paths(rule: ClosedFormRule, best: MentoredEnvelope) -> ClosedFormRule:
    return best.with_cached_paths(rule) if isinstance(rule, Mentored) else rule


def _optimal_for(rule: ClosedFormRule) -> Divergence | None:
    """The divergence for which a rule is the best one; None for the other rules."""
    exact = isinstance(rule, Mentored) and rule.bracket == "exact"
    return rule.divergence if exact and isinstance(rule, Mentored) else None
