"""Silences progress bars, advice and warnings of libraries; prints our own warnings as notes."""

import logging
import os
import warnings

from outrider.cli.errors import debugging, say


def silence() -> None:
    """Silences libraries; call it before importing transformers. OUTRIDER_DEBUG=1 disables it."""
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
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao if installed
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=UserWarning, module=r"outrider\.")
    warnings.showwarning = _note


def silence_transformers() -> None:
    """Turns off transformers' own logging."""
    if debugging():
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _note(message: Warning | str, *_: object, **__: object) -> None:
    say(f"note: {message}")
