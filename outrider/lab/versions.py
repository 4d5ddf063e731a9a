"""The versions of the software that a result depends on."""

import platform

import torch
import transformers

import outrider


def versions() -> dict[str, str]:
    """Versions of this package, torch, transformers and Python."""
    return {
        "outrider": outrider.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
