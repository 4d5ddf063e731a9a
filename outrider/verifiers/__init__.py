"""Verification rules, one file each. They import only ``core`` and ``sampling``."""

from outrider.verifiers.block import Block
from outrider.verifiers.greedy import Greedy
from outrider.verifiers.rejection import Rejection

__all__ = ["Block", "Greedy", "Rejection"]
