"""Verification rules, one file each. They import only ``core`` and ``sampling``."""

from outrider.verifiers.best_of_k import BestOfK
from outrider.verifiers.bild import Bild
from outrider.verifiers.block import Block
from outrider.verifiers.cascade import Cascade, CascadeGreedy
from outrider.verifiers.commit import Commit
from outrider.verifiers.coupled import Coupled
from outrider.verifiers.distinct import Distinct
from outrider.verifiers.ensemble import Ensemble, EnsembleGreedy
from outrider.verifiers.greedy import Greedy
from outrider.verifiers.joint import Joint
from outrider.verifiers.lenience import Lenience
from outrider.verifiers.mentored import Mentored
from outrider.verifiers.mtad import Mtad
from outrider.verifiers.rejection import Rejection
from outrider.verifiers.relaxed import Relaxed, RelaxedGreedy
from outrider.verifiers.sample_match import SampleMatch
from outrider.verifiers.spectr import Spectr
from outrider.verifiers.traversal import Traversal
from outrider.verifiers.typical import Typical

__all__ = [
    "BestOfK",
    "Bild",
    "Block",
    "Cascade",
    "CascadeGreedy",
    "Commit",
    "Coupled",
    "Distinct",
    "Ensemble",
    "EnsembleGreedy",
    "Greedy",
    "Joint",
    "Lenience",
    "Mentored",
    "Mtad",
    "Rejection",
    "Relaxed",
    "RelaxedGreedy",
    "SampleMatch",
    "Spectr",
    "Traversal",
    "Typical",
]
