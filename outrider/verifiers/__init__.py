"""Verification rules, one file each. They import only ``core`` and ``sampling``."""

from outrider.verifiers.greedy import Greedy
from outrider.verifiers.rejection import Rejection

__all__ = ["Greedy", "Rejection"]
