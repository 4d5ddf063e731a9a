"""Lossy decoding on the user's own pair: the gain in speed against the loss in fidelity.

plane         node-local rules on the same distributions: acceptance against divergence
generations   whole continuations: speed against perplexity under the target
"""

from outrider.lab.frontier.distributions import paired_distributions
from outrider.lab.frontier.document import dumps, write
from outrider.lab.frontier.families import FAMILIES, SETTINGS, Family, Setting
from outrider.lab.frontier.generations import generate
from outrider.lab.frontier.plane import Plane, compare_rules

__all__ = [
    "FAMILIES",
    "SETTINGS",
    "Family",
    "Plane",
    "Setting",
    "compare_rules",
    "dumps",
    "generate",
    "paired_distributions",
    "write",
]
