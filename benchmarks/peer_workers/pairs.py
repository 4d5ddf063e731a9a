"""The compared pairs, as folders of float32 safetensors that all peers can read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.inflate import Shape, inflate
from outrider import assets
from outrider.runtime import HFModel, load_model

SMOLLM2 = Path("runs/smollm2/model")
SMOLLM2_DRAFT = "embedded:smollm2-draft"
SMOLLM2_HEAD = "embedded:smollm2-eagle3"
ONE_BILLION = Shape(hidden_size=2048, num_layers=22, num_key_value_heads=16, intermediate_size=5632)


@dataclass(frozen=True)
class Pair:
    """The folders of a target and a draft.

    Attributes:
        name: ``embedded``, ``1B-cost`` or ``smollm2``.
        target: folder.
        draft: folder.
        parameters: number of the target's.
        head: of the target, as ``outrider.load`` takes it.
    """

    name: str
    target: Path
    draft: Path
    parameters: int
    head: str | None = None


def embedded(exports: Path) -> Pair:
    """The embedded pair, converted to float32, which changes no value."""
    folder = exports / "embedded"
    target = _saved(folder / "target", _load(assets.target_path()))
    draft = _saved(folder / "draft", _load(assets.draft_path()))
    return Pair("embedded", target, draft, _parameters(target))


def one_billion(exports: Path) -> Pair:
    """The embedded pair with the target inflated to a billion parameters of the same function."""
    small = embedded(exports)
    folder = exports / "1B-cost" / "target"
    if not folder.exists():
        base = _load(assets.target_path())
        _saved(folder, HFModel(inflate(base.module, ONE_BILLION), base.tokenizer))
    return Pair("1B-cost", folder, small.draft, _parameters(folder))


def smollm2(exports: Path) -> Pair:
    """SmolLM2-135M, which ``recipes/smollm2.py`` fetches, with the draft model and the head for it
    that come with the package."""
    folder = exports / "smollm2"
    target, draft = folder / "target", folder / "draft"
    for path, source in ((target, SMOLLM2), (draft, SMOLLM2_DRAFT)):
        if not path.exists():
            _saved(path, _load(source))
    return Pair("smollm2", target, draft, _parameters(target), SMOLLM2_HEAD)


PAIRS = {"embedded": embedded, "1B-cost": one_billion, "smollm2": smollm2}


def _load(source: str | Path) -> HFModel:
    return load_model(source, dtype="float32", device="cpu")


def _saved(folder: Path, model: HFModel) -> Path:
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        model.module.save_pretrained(unfinished)
        tokenizer: Any = model.tokenizer
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def _parameters(folder: Path) -> int:
    """The number of parameters, from the headers of the files."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                total += torch.Size(tensors.get_slice(name).get_shape()).numel()
    return total
