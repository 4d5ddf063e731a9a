"""Sources of drafts, one file each."""

from outrider.drafters.model import ModelDrafter
from outrider.drafters.none import NoDraft

__all__ = ["ModelDrafter", "NoDraft"]
