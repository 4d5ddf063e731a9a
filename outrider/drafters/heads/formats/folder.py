"""Reads and writes the files of a head's folder: ``config.json`` and the weights.

Weights are read from safetensors files, or from ``.bin`` and ``.pt`` files, as the first heads were
published; of these only tensors are read, and no code is run.
"""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.core.errors import ModelLoadError
from outrider.runtime.hf.source import named

_BIN = ("*.bin", "*.pt")


def read_config(folder: str | Path) -> dict[str, Any] | None:
    """A folder's ``config.json``; None if the folder or the file does not exist.

    Raises:
        ModelLoadError: a file that is no JSON object.
    """
    file = _located(folder) / "config.json"
    if not os.path.isfile(file):  # false for names that no file can have, too
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"cannot read {file}: it must hold a JSON object")
    return config


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder by name, on the CPU.

    Raises:
        ModelLoadError: no weights, or files that cannot be read.
    """
    folder = _located(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        files = sorted(file for pattern in _BIN for file in folder.glob(pattern))
    if not files:
        raise ModelLoadError(
            f"{folder} has no weights: a head's folder holds config.json and model.safetensors, or "
            f"pytorch_model.bin"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelLoadError(f"cannot read {file}: {reason}") from error
    return tensors


def write_folder(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    file: str = "model.safetensors",
) -> None:
    """Writes a head's folder; each file is replaced at once, the weights first.

    Args:
        folder: made if it does not exist.
        config: what ``config.json`` holds.
        tensors: the weights.
        file: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / file
    partial = weights.with_suffix(".partial")
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(copies, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(partial, weights)
    text = folder / "config.partial"
    text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(text, folder / "config.json")


def _located(source: str | Path) -> Path:
    """The folder of an embedded draft (``embedded:NAME``), or the folder of that name."""
    return named(source) or Path(os.path.expanduser(source))


def require(config: Mapping[str, Any], key: str, name: str) -> Any:
    """A value that a configuration must have.

    Raises:
        ModelLoadError: it has none.
    """
    if config.get(key) is None:
        raise ModelLoadError(f"{name}: config.json has no {key!r}; the folder is incomplete")
    return config[key]
