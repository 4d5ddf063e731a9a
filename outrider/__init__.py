"""Outrider: speculative decoding for PyTorch and Hugging Face ``transformers`` models.

``load`` builds an :class:`Engine` for a pair of models; ``Sampling`` holds a request's parameters.
Names are imported when they are first used, so that ``import outrider`` and ``outrider --help`` do
not wait for torch.
"""

from typing import TYPE_CHECKING

from outrider.imports import quicken_imports
from outrider.imports.lazy import lazy

if TYPE_CHECKING:
    from outrider.core.errors import OutriderError
    from outrider.drafters.search.beam_search import beam_search
    from outrider.engine import Engine, Event, Result, Results, Speculation, Stats, load
    from outrider.engine.for_transformers import generate_for_transformers
    from outrider.methods import METHODS
    from outrider.runtime import load_model
    from outrider.sampling import Grammar, Sampling

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Engine",
    "Event",
    "Grammar",
    "OutriderError",
    "Result",
    "Results",
    "Sampling",
    "Speculation",
    "Stats",
    "__version__",
    "beam_search",
    "generate_for_transformers",
    "load",
    "load_model",
]

_HOME = {
    "METHODS": "outrider.methods",
    "Engine": "outrider.engine",
    "Event": "outrider.engine",
    "Grammar": "outrider.sampling",
    "OutriderError": "outrider.core.errors",
    "Result": "outrider.engine",
    "Results": "outrider.engine",
    "Sampling": "outrider.sampling",
    "Speculation": "outrider.engine",
    "Stats": "outrider.engine",
    "beam_search": "outrider.drafters.search.beam_search",
    "generate_for_transformers": "outrider.engine.for_transformers",
    "load": "outrider.engine",
    "load_model": "outrider.runtime",
}

__getattr__, __dir__ = lazy(__name__, _HOME)

quicken_imports()
