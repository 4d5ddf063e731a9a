"""The frontier of lossy decoding on a pair of the user's own: what is gained for what is given up.

plane         rules of one place on the same laws: acceptance against divergence
generations   whole texts: speed against the target's perplexity
"""

from outrider.bench.frontier.document import about, dumps, write
from outrider.bench.frontier.families import FAMILIES, SETTINGS, Family, Setting
from outrider.bench.frontier.generations import generate
from outrider.bench.frontier.laws import meet
from outrider.bench.frontier.plane import Plane, survey

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
