"""Verification rules, one file each. They import only ``core`` and ``sampling``."""

from outrider.verifiers.bild import Bild
from outrider.verifiers.block import Block
from outrider.verifiers.coupled import Coupled
from outrider.verifiers.greedy import Greedy
from outrider.verifiers.rejection import Rejection
from outrider.verifiers.sample_match import SampleMatch

__all__ = ["Bild", "Block", "Coupled", "Greedy", "Rejection", "SampleMatch"]
