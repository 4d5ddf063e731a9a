"""Files that appear under their names complete, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.core.errors import OutriderError


class SavingError(OutriderError, OSError):
    """A file could not be written; the one before it is intact."""


def write_atomically(path: Path, write: Callable[[Path], object], num_bytes: int) -> None:
    """Writes a file next to its path, and then moves it there.

    Args:
        path: where the file is afterwards.
        write: writes it to a path.
        num_bytes: about how large it is, for the error.

    Raises:
        SavingError: the disk is full, say.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise saving_error(path, num_bytes, error) from error


def remove_partial(folder: Path) -> None:
    """Deletes what killed processes did not finish to write."""
    for file in folder.rglob("*.partial"):
        file.unlink(missing_ok=True)


def saving_error(path: Path, num_bytes: int, error: OSError) -> SavingError:
    """The error for a file that could not be written."""
    return SavingError(
        f"cannot write {path}: {error.strerror or error}; it needs about {num_bytes / 1e6:.1f} MB. "
        f"What was saved before is intact"
    )


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Saves weights atomically. Raises SavingError."""
    own = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    size = sum(tensor.nbytes for tensor in own.values())
    write_atomically(path, lambda partial: save_file(own, partial), size)


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a file."""
    with torch.inference_mode(False):
        return load_file(path)


def save_json(path: Path, document: Any) -> None:
    """Saves a document atomically. Raises SavingError."""
    text = json.dumps(document, indent=1)
    write_atomically(path, lambda partial: partial.write_text(text), len(text))
