"""Exports a checkpoint to a Hugging Face folder: bf16 safetensors, tokenizer, model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outrider.train.checkpoint import CHECKPOINT

M = TypeVar("M", bound=nn.Module)


def load_weights(model: PreTrainedModel, folder: Path) -> int:
    """Load the weights of `folder`'s checkpoint into `model` and return the checkpoint's step.

    Raises:
        ValueError: the folder has no checkpoint.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        raise ValueError(f"no checkpoint in {folder}; train there first")
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    return int(state["step"])


def in_bfloat16(model: M) -> M:
    """The same model with its parameters in bfloat16, in place.

    Buffers keep their precision, as in a model that is loaded in bfloat16. ``model.bfloat16()``
    would round the frequencies of rotary embeddings, too, which makes another model of it.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, card: str
) -> None:
    """Write a folder that the AutoModel classes and AutoTokenizer can load.

    Converts the model's parameters to bfloat16 in place.
    """
    in_bfloat16(model)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for name in ("backend", "is_local", "local_files_only"):  # these describe how it was loaded
        settings.pop(name, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # every transformers version has it
    path.write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "README.md").write_text(card)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner can read
