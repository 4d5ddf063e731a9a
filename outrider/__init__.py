"""Outrider: speculative decoding for PyTorch and Hugging Face ``transformers`` models."""

from outrider.core.errors import OutriderError
from outrider.engine import Engine, Event, Result, Results, Stats, load
from outrider.methods import METHODS
from outrider.models import load_model
from outrider.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Engine",
    "Event",
    "OutriderError",
    "Result",
    "Results",
    "Sampling",
    "Stats",
    "__version__",
    "load",
    "load_model",
]
