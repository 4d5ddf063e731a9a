"""Silences what libraries print on their own: progress bars, advice, warnings. Our own
warnings become notes."""

import logging
import os
import warnings

from outrider.cli.errors import debugging, say


def silence() -> None:
    """Called before transformers is imported; ``OUTRIDER_DEBUG=1`` leaves everything audible."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if debugging():
        return
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("HF_HUB_VERBOSITY", "error"),
    ):
        os.environ.setdefault(name, value)
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao where it is
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=UserWarning, module=r"outrider\.")
    warnings.showwarning = _note


def silence_transformers() -> None:
    """Imports transformers' own logging and turns it off."""
    if debugging():
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _note(message: Warning | str, *_: object, **__: object) -> None:
    say(f"note: {message}")
