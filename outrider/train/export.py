"""Exports a checkpoint to a Hugging Face folder: bf16 safetensors, tokenizer, model card."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outrider.train.checkpoint import CHECKPOINT


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


def export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, card: str
) -> None:
    """Write a folder that the AutoModel classes and AutoTokenizer can load.

    Converts the model to bfloat16 in place.
    """
    model.bfloat16()
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
