"""The named methods, imported on first use. ``catalogue`` describes them without torch."""

from typing import TYPE_CHECKING

from outrider.imports.lazy import lazy

if TYPE_CHECKING:
    from outrider.methods.method import Method, Parts, Recipe
    from outrider.methods.registry import METHODS, find_method

__all__ = ["METHODS", "Method", "Parts", "Recipe", "find_method"]

_HOME = {
    "METHODS": "outrider.methods.registry",
    "Method": "outrider.methods.method",
    "Parts": "outrider.methods.method",
    "Recipe": "outrider.methods.method",
    "find_method": "outrider.methods.registry",
}

__getattr__, __dir__ = lazy(__name__, _HOME)
