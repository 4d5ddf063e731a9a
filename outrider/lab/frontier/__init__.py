"""The frontier of lossy decoding on a pair of the user's own: what is gained for what is given up.

plane         rules of one place on the same distributions: acceptance against divergence
generations   whole texts: speed against the target's perplexity
"""

from outrider.lab.frontier.distributions import meet
from outrider.lab.frontier.document import about, dumps, write
from outrider.lab.frontier.families import FAMILIES, SETTINGS, Family, Setting
from outrider.lab.frontier.generations import generate
from outrider.lab.frontier.plane import Plane, survey

__all__ = [
    "FAMILIES",
    "SETTINGS",
    "Family",
    "Plane",
    "Setting",
    "about",
    "dumps",
    "generate",
    "meet",
    "survey",
    "write",
]
