"""Adapts the draft model of an engine while the engine generates."""

from outrider.train.online.adaptable import adaptable_methods
from outrider.train.online.adaptation import Adaptation, adapt
from outrider.train.online.files import SavingError
from outrider.train.online.settings import Settings as AdaptSettings
from outrider.train.online.state import Point, State
from outrider.train.online.versions import Version

__all__ = [
    "AdaptSettings",
    "Adaptation",
    "Point",
    "SavingError",
    "State",
    "Version",
    "adapt",
    "adaptable_methods",
]
