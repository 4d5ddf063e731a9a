"""Checks of a model's source (a folder, a hub id, a module) before anything is read."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider import assets
from outrider.core.errors import InvalidParameterError, ModelLoadError, UnsupportedModelError
from outrider.core.values import shown
from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.hf.gguf import is_gguf

_WEIGHTS = {".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx"}
_FOLDERS = (
    "a model is a folder with config.json, a tokenizer and safetensors weights, or a GGUF file"
)


def check_source(source: object, role: str) -> None:
    """Checks a model's source before anything is read.

    Raises:
        ModelLoadError: a path that is not a model folder, or an unknown ``embedded:NAME``.
        UnsupportedModelError: a module that is not a ``transformers`` model.
        InvalidParameterError: a source that is neither a path, nor a hub id, nor a model.
    """
    if isinstance(source, str | Path):
        if named(source) is None:
            _check_folder(str(source), role)
    elif not isinstance(eager(source), HFModel | PreTrainedModel):
        kind = f"{role} ({type(source).__name__})"
        if hasattr(source, "merge_and_unload"):  # PEFT
            raise UnsupportedModelError(f"{kind} has adapters: pass model.merge_and_unload()")
        if isinstance(source, torch.nn.Module):
            raise UnsupportedModelError(
                f"{kind} is no transformers model: pass what "
                f"AutoModelForCausalLM.from_pretrained returns, unwrapped"
            )
        raise InvalidParameterError(
            f"{role}={shown(source)}: must be a folder, a hub id or a transformers model"
        )


def named(source: str | Path) -> Path | None:
    """The folder of a draft that comes with the package, from ``embedded:NAME``; else None.

    Raises:
        ModelLoadError: there is none of that name; lists those that there are.
    """
    try:
        return assets.named_path(source)
    except FileNotFoundError as error:
        raise ModelLoadError(str(error)) from error


def eager(source: Any) -> Any:
    """The module inside the result of ``torch.compile``; any other source as it is."""
    return getattr(source, "_orig_mod", source) if isinstance(source, torch.nn.Module) else source


def _check_folder(source: str, role: str) -> None:
    folder = Path(os.path.expanduser(source))
    start = f"cannot load {role} {source!r}: "
    if not source:
        raise ModelLoadError(f"{start}no name; {_FOLDERS}")
    suffix = folder.suffix.lower()
    if not os.path.exists(folder):
        if suffix in _WEIGHTS:
            raise ModelLoadError(f"{start}no such file; {_FOLDERS}")
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise ModelLoadError(f"{start}no such folder")
        return
    if is_gguf(folder):
        return
    if not folder.is_dir():
        raise ModelLoadError(f"{start}not a folder; {_FOLDERS}")
    has_weights = any(folder.glob("*.safetensors"))
    quantized = sorted(folder.glob("*.gguf"))
    if quantized and not has_weights:
        raise ModelLoadError(
            f"{start}the folder holds GGUF files only: name one of them, such as "
            f"{str(folder / quantized[0].name)!r}"
        )
    if not (folder / "config.json").exists():
        raise ModelLoadError(f"{start}the folder has no config.json")
    if not has_weights:
        found = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt*")
        )
        what = f"only {', '.join(found[:3])}, which are pickles" if found else "no weights"
        raise ModelLoadError(
            f"{start}the folder holds {what}; pickles can run code, so convert to safetensors "
            f"first (model.save_pretrained)"
        )
