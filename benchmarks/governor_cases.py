"""The prompts and the drafts that ``benchmarks.governor`` compares."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider import Engine

NOISE = {"good": 0.0, "poor": 0.15, "useless": 2.0}
"""Noise in the weights of each kind of draft, over their standard deviation."""

_CODE = (
    "def fibonacci(n):\n    ",
    "import os\n\ndef read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "def merge(left, right):\n    result = []\n    ",
)
_CHAT = (
    "Q: Why do cats purr?\nA:",
    "Q: How does a bicycle stay upright?\nA:",
    "Q: What should I cook tonight?\nA:",
    "Q: Who wrote the first compiler?\nA:",
)
_COPIED = "names = ['Ada', 'Grace', 'Edsger', 'Barbara', 'Donald', 'Tony', 'John', 'Alan']\n"


def prompts_of(text: str, rows: int, num_tokens: int) -> list[Any]:
    """Prompts of one kind, each a little different from the others."""
    if text == "random":
        generator = torch.Generator().manual_seed(rows)
        return torch.randint(num_tokens, (rows, 24), generator=generator).tolist()
    if text == "copies":
        return [f"# {row}\n" + _COPIED * 4 for row in range(rows)]
    some = _CODE if text == "code" else _CHAT
    return [f"# {row}\n{some[row % len(some)]}" for row in range(rows)]


def add_noise(module: nn.Module, noise: float) -> None:
    """Adds normal noise to each matrix, relative to its standard deviation. Changes the weights in
    place, where compiled programs read them."""
    changed = noisy(dict(module.named_parameters()), noise)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(changed[name])


def noisy(weights: Mapping[str, Tensor], noise: float) -> dict[str, Tensor]:
    """Weights with normal noise in each matrix, relative to its standard deviation."""
    generator = torch.Generator().manual_seed(1)
    changed = dict(weights)
    for name, weight in weights.items():
        if weight.ndim > 1 and weight.is_floating_point() and noise:
            draws = torch.randn(weight.shape, generator=generator).to(weight)
            changed[name] = weight.detach() + noise * weight.float().std().to(weight) * draws
    return changed


def drafting_module(engine: Engine) -> nn.Module:
    """The weights of an engine's draft model or head. Each engine has its own copy of a head."""
    if engine.draft is not None:
        return engine.draft.module
    (model,) = engine.drafter.capabilities.models
    network: nn.Module = model.network  # without the embeddings, which are the target's
    return network
