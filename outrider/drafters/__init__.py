"""Sources of drafts, one file each."""

from outrider.drafters.chain.bild import BildDrafter
from outrider.drafters.chain.model import ModelDrafter
from outrider.drafters.chain.none import NoDraft
from outrider.drafters.chain.pick import COUPLED, INDEPENDENT, Picker

__all__ = ["COUPLED", "INDEPENDENT", "BildDrafter", "ModelDrafter", "NoDraft", "Picker"]
