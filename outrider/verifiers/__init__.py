"""Verification rules, one file each. They import only ``core`` and ``sampling``."""

from outrider.verifiers.bild import Bild
from outrider.verifiers.block import Block
from outrider.verifiers.cascade import Cascade, CascadeGreedy
from outrider.verifiers.coupled import Coupled
from outrider.verifiers.ensemble import Ensemble, EnsembleGreedy
from outrider.verifiers.greedy import Greedy
from outrider.verifiers.lenience import Lenience
from outrider.verifiers.mentored import Mentored
from outrider.verifiers.rejection import Rejection
from outrider.verifiers.relaxed import Relaxed, RelaxedGreedy
from outrider.verifiers.sample_match import SampleMatch
from outrider.verifiers.typical import Typical

__all__ = [
    "Bild",
    "Block",
    "Cascade",
    "CascadeGreedy",
    "Coupled",
    "Ensemble",
    "EnsembleGreedy",
    "Greedy",
    "Lenience",
    "Mentored",
    "Rejection",
    "Relaxed",
    "RelaxedGreedy",
    "SampleMatch",
    "Typical",
]
