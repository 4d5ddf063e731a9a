"""Sources of drafts, one file each."""

from outrider.drafters.bild import BildDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.none import NoDraft
from outrider.drafters.pick import COUPLED, INDEPENDENT, Picker

__all__ = ["COUPLED", "INDEPENDENT", "BildDrafter", "ModelDrafter", "NoDraft", "Picker"]
