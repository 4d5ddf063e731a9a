"""Reads and writes the files of a head: a ``config.json`` and its tensors."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.core.errors import ModelLoadError

CONFIG = "config.json"
TENSORS = "model.safetensors"


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a head.

    Raises:
        ModelLoadError: there is none, or it is no JSON object.
    """
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(
            f"{file} cannot be read ({error.strerror or error}): a head is a folder with a "
            f"{CONFIG} and tensors"
        ) from None
    except ValueError as error:
        raise ModelLoadError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return config


def read_tensors(folder: Path, names: Collection[str] = ()) -> dict[str, Tensor]:
    """The tensors of all files of a head, on the CPU.

    Args:
        folder: where they are.
        names: of files that are read in place of ``model*.safetensors`` and ``pytorch_model*.bin``; the
            first that exists.

    Raises:
        ModelLoadError: there is no such file, or it is damaged.
    """
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if names:
        files = [folder / name for name in names if (folder / name).exists()][:1]
    if not files:
        wanted = " or ".join(names) if names else "model.safetensors or pytorch_model.bin"
        raise ModelLoadError(f"{folder} holds no {wanted}: get the head's files again")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from None
    return tensors


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = TENSORS
) -> None:
    """Writes a head's files; each appears complete or not at all, the config last."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{file}.partial"
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial
    )
    partial.replace(folder / file)
    partial = folder / f"{CONFIG}.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / CONFIG)


def fill(
    network: nn.Module, tensors: Mapping[str, Tensor], folder: Path, ignored: Collection[str] = ()
) -> None:
    """Copies tensors into a network by name.

    Args:
        network: the network; each of its parameters must have a tensor.
        tensors: the tensors.
        folder: where they come from, for messages.
        ignored: tensors that the network may do without.

    Raises:
        ModelLoadError: a tensor is missing, unknown or of another shape; the message names it.
    """
    wanted = dict(network.named_parameters())
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise ModelLoadError(f"{folder} lacks the tensor {missing[0]!r}, which its config asks for")
    unknown = sorted(set(tensors) - set(wanted) - set(ignored))
    if unknown:
        raise ModelLoadError(
            f"{folder} has a tensor {unknown[0]!r}, for which its config has no part of the head"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            found = tensors[name]
            if found.shape != parameter.shape:
                raise ModelLoadError(
                    f"{folder}: tensor {name!r} has shape {tuple(found.shape)}, and its config "
                    f"asks for {tuple(parameter.shape)}"
                )
            parameter.copy_(found)
